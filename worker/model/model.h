// What computes steps: the seam at which the engine's tests put a scripted one. ModelRunner is the real one. Used by
// the engine thread.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"
#include "worker/model/step.h"

namespace millrace {

// What a model can draft with besides tokens that it is given. kOwnCache: a draft model, whose cache has the target's
// blocks and is filled by what DraftInput makes it read. kSharedCache: the first layers of the target, which have read
// what the target has.
enum class DraftModel : uint8_t { kNone, kOwnCache, kSharedCache };

// Tokens that a sequence drafts in one step.
inline constexpr int32_t kMaxDrafts = 8;

class Model {
 public:
  virtual ~Model() = default;
  // Steps may be launched ahead of the results of those before them, that many in all. A token below 0 in a later one
  // stands for the token that slot ~token sampled last.
  virtual int max_steps_in_flight() const = 0;
  virtual DraftModel draft_model() const { return DraftModel::kNone; }
  // Whether rows after a guess see it in their token history.
  virtual bool guesses_with_penalties() const { return true; }
  // REQUIRES: the input is consistent and within the model's limits (the engine's packer sees to it).
  virtual void Launch(const StepInput& input) = 0;
  // A step with guesses is launched when no other is under way, and is the only one until its results are taken.
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

}  // namespace millrace
