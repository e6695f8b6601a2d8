// How a step reaches a GPU and how its tokens come back while the host is already ahead. The host writes a step into a
// StagedStep, which lies in memory that both sides see (DeviceBuffer::Shared), and hands the work to the stream;
// LoadStep, the first of that work, takes the step over into the DeviceStep, whose addresses and padded sizes are
// fixed, so that the work can be a recorded graph; StoreTokens, the last, returns the tokens. kStepTurns staged steps
// take turns in the order of launch; the GPU counts the turns itself. CUDA alone: on the CPU the host's memory is the
// device's.
//
// Letters as in ops.h.
#pragma once

#include "kernels/ops.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace millrace {

inline constexpr int kStepTurns = 8;

// The true sizes of a step; the views below are as large as the largest step.
struct StepCounts {
  int32_t rows = 0;        // T
  int32_t sequences = 0;   // S
  int32_t logit_rows = 0;  // R
  int32_t biases = 0;
};

struct StagedStep {
  StepCounts* counts = nullptr;
  Vec<int32_t> tokens;               // [T] below 0: the token that slot ~token sampled last
  Vec<int32_t> positions, kv_slots;  // [T]
  Vec<int32_t> query_start;          // [S + 1]
  Vec<int32_t> context_len;          // [S]
  Vec<int32_t> first_block;          // [S] where its block table begins in `blocks`; it covers the context
  Vec<int32_t> blocks;
  Vec<int32_t> logit_rows;    // [R]
  Vec<int32_t> slots;         // [R] the slot that keeps the sampled token as its last; -1: none
  Vec<int32_t> targets;       // [R] a token given instead of sampled, or -1
  Vec<SamplingRow> sampling;  // [R]
  Vec<LogitBias> biases;
  Vec<int32_t> chosen;  // [R] from StoreTokens: the target or the sampled token
};

struct DeviceStep {
  Vec<int32_t> tokens, positions, kv_slots;  // [T]
  Vec<int32_t> query_start;                  // [S + 1]
  Vec<int32_t> context_len;                  // [S]
  Mat<int32_t> block_table;                  // [S, most blocks of a sequence]
  Vec<int32_t> logit_rows, slots, targets;   // [R]
  Vec<SamplingRow> sampling;                 // [R]
  Vec<LogitBias> biases;
  Vec<int32_t> sampled, chosen;  // [R]
  Vec<int32_t> last_tokens;      // by slot, across steps
  Vec<uint32_t> turn;            // [1] steps so far
};

struct StagedSteps {
  StagedStep turns[kStepTurns];
};

// Takes over the step whose turn it is, at the sizes of `to`'s views: rows beyond the true ones get token 0, position 0
// and no KV slot; sequences beyond them have no rows and no context; logit rows beyond them read row 0 and are kept by
// no slot.
void LoadStep(const DeviceStep& to, const StagedSteps& from, Stream& stream);

// step.chosen[r] = targets[r] if there is one, else sampled[r]; the same to the staged step, and sampled tokens to
// their slots. Ends the turn.
void StoreTokens(const StagedSteps& to, const DeviceStep& step, Stream& stream);

}  // namespace millrace
