// The sizes of a worker, fixed at start-up. Everything that comes from outside is checked against them once, on
// arrival; every table of the engine is bounded by them.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"
#include "worker/model/model.h"

namespace millrace {

// What one sequence may bring along.
inline constexpr int kMaxStopTokens = 64;
inline constexpr int kMaxBiases = 1024;
inline constexpr int kMaxBiasesOfASlot = kMaxBiases + kMaxStopTokens;  // stop tokens are forbidden below min_length

struct EngineLimits {
  int32_t num_slots = 0;
  int32_t num_blocks = 0;
  int32_t vocab_size = 0;
  int32_t max_context = 0;     // tokens of one sequence, prompt and output; at most num_blocks * kBlockTokens
  int32_t max_rows = 0;        // rows of a step; at least num_slots
  int32_t max_logit_rows = 0;  // rows of a step that lead to logits; at least num_slots
  DraftModel draft_model = DraftModel::kNone;
  bool guesses_with_penalties = true;

  int32_t max_table_blocks() const { return (max_context + kBlockTokens - 1) / kBlockTokens; }
};

}  // namespace millrace
