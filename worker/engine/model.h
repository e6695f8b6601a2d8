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
  virtual void Run(const StepInput& input, StepOutput& output) = 0;
  virtual void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) = 0;
  virtual void CountToken(int slot, int32_t token) = 0;
};

class RunnerModel final : public Model {
 public:
  explicit RunnerModel(std::unique_ptr<ModelRunner> runner) : runner_(std::move(runner)) {}

  void Run(const StepInput& input, StepOutput& output) override { runner_->Run(input, output); }
  void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) override {
    runner_->ResetHistory(slot, prompt, output);
  }
  void CountToken(int slot, int32_t token) override { runner_->CountToken(slot, token); }

 private:
  std::unique_ptr<ModelRunner> runner_;
};

}  // namespace millrace
