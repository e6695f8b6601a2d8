// What the engine needs of a model: the seam at which its tests put a scripted one. RunnerModel is the real one; it
// owns the ModelRunner and lives as long as the worker. Used by the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "worker/model/model_runner.h"
#include "worker/model/step.h"

namespace millrace {

class Model {
 public:
  virtual ~Model() = default;
  // Steps may be launched ahead of the results of those before them, that many in all. A token below 0 in a later one
  // stands for the token that slot ~token sampled last.
  virtual int max_steps_in_flight() const = 0;
  virtual void Launch(const StepInput& input) = 0;
  // The results of the oldest step launched. REQUIRES: there is one.
  virtual void Await(StepOutput& output) = 0;
  // The token history of a slot, for penalties: forgets it and takes the prompt and the output so far. Sampled tokens
  // are counted by the step that samples them.
  virtual void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) = 0;

  void Run(const StepInput& input, StepOutput& output) {
    Launch(input);
    Await(output);
  }
};

class RunnerModel final : public Model {
 public:
  explicit RunnerModel(std::unique_ptr<ModelRunner> runner) : runner_(std::move(runner)) {}

  int max_steps_in_flight() const override { return runner_->max_steps_in_flight(); }
  void Launch(const StepInput& input) override { runner_->Launch(input); }
  void Await(StepOutput& output) override { runner_->Await(output); }
  void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) override {
    runner_->ResetHistory(slot, prompt, output);
  }

 private:
  std::unique_ptr<ModelRunner> runner_;
};

}  // namespace millrace
