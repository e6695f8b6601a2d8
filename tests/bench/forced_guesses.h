// A model of which guesses are right with a given probability, whatever its weights: with random weights no draft model
// would ever agree with another. What it computes, and how long it takes, is the model's own; only which of the sampled
// tokens count is drawn here. Used by the engine thread.
#pragma once

#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "worker/model/model.h"

namespace millrace {

class ForcedGuesses final : public Model {
 public:
  ForcedGuesses(std::unique_ptr<Model> model, double right) : model_(std::move(model)), right_(right) {}

  int max_steps_in_flight() const override { return model_->max_steps_in_flight(); }
  DraftModel draft_model() const override { return model_->draft_model(); }
  bool guesses_with_penalties() const override { return model_->guesses_with_penalties(); }
  void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) override {
    model_->ResetHistory(slot, prompt, output);
  }
  void Launch(const StepInput& input) override {
    model_->Launch(input);
    is_guess_.push_back(input.is_guess);
  }
  void Await(StepOutput& output) override {
    model_->Await(output);
    const std::vector<bool> is_guess = std::move(is_guess_.front());
    is_guess_.erase(is_guess_.begin());
    for (size_t r = 0; r < is_guess.size(); ++r) {
      if (!is_guess[r]) continue;
      const bool is_right = output.tokens[r - 1] != kNotReached && right_(random_);
      output.tokens[r] = is_right ? static_cast<int32_t>(random_() % 10'000) : kNotReached;
    }
  }

 private:
  std::unique_ptr<Model> model_;
  std::mt19937_64 random_;
  std::bernoulli_distribution right_;
  std::vector<std::vector<bool>> is_guess_;  // of steps under way
};

}  // namespace millrace
