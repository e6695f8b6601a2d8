// What one step computes, and what comes out of it: the boundary between the engine (which decides what is in a step)
// and the model (which computes it). Host memory, reused from step to step; used by the engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/ops.h"

namespace millrace {

// A row whose token the draft model guesses before the step is computed: see DraftInput.
inline constexpr int32_t kGuessedToken = INT32_MIN;
// In StepOutput: the row continues from a guess that was wrong, so nothing was sampled from it.
inline constexpr int32_t kNotReached = -2;

// What the draft model does for a sequence before the step is computed: it reads tokens that it has not read yet, and
// guesses the next `count` ones, which are the tokens of the sequence's rows after the first. Guess j is sampled as
// logit row first_logit_row + j is: with the same parameters, at the same position, with the same noise.
struct DraftInput {
  int32_t sequence = 0;         // of S
  int32_t count = 0;            // 0: it reads only
  int32_t first_logit_row = 0;  // of R
  int32_t position = 0;         // of the first token it reads; where count > 0, the last one is its row's in the step
  int32_t unread_begin = 0;     // the tokens: range [unread_begin, unread_end) of `unread`, at least one
  int32_t unread_end = 0;
};

// A ragged batch of S sequences over T rows, with R of the rows leading to logits.
struct StepInput {
  std::vector<int32_t> tokens;       // [T] token ids; below 0: the token that slot ~token sampled last (see Model)
  std::vector<int32_t> positions;    // [T] position of each in its sequence
  std::vector<int32_t> kv_slots;     // [T] where its k and v go: block * kBlockTokens + offset
  std::vector<int32_t> query_start;  // [S + 1]
  std::vector<int32_t> context_len;  // [S] tokens in the cache once this step's are in it
  std::vector<int32_t> block_table;  // [S, block_table_width]
  int64_t block_table_width = 0;

  std::vector<int32_t> logit_rows;  // [R] rows of T
  std::vector<int32_t> slots;       // [R] the slot whose next token is sampled; -1: none is
  // [R] How to sample the row; or, where target >= 0, no sampling: only the log-probability of `target` (prompt
  // logprobs).
  std::vector<SamplingRow> sampling;
  std::vector<int32_t> target;        // [R] -1: sample
  std::vector<int32_t> num_logprobs;  // [R] -1: none wanted; otherwise the chosen token's and that many likeliest ones
  // [R] The row's own token is a guess of what the logit row before it samples. It counts only if that is what came.
  std::vector<bool> is_guess;
  std::vector<DraftInput> drafts;
  std::vector<int32_t> unread;
  std::vector<LogitBias> biases;  // ranges of it are named by the sampling rows

  void Clear();
  int64_t num_rows() const { return static_cast<int64_t>(tokens.size()); }
};

struct TokenLogProbs {
  float chosen = 0;                 // ln p of the chosen token, before any logits processing
  std::vector<int32_t> top_tokens;  // best first
  std::vector<float> top_values;
};

struct StepOutput {
  std::vector<int32_t> tokens;  // [R] sampled token; -1: the logits were not finite; the target where one was given;
                                // kNotReached
  std::vector<TokenLogProbs> logprobs;  // [R] filled where wanted
  double draft_us = 0;                  // of the step: what drafting took
};

}  // namespace millrace
