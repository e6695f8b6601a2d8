// What the next step computes: a pure function of the running set, the limits and the predicted cost of a step.
//
// 1. Every decoding slot whose lease has room gets its row; the others are stalled. Slots that draft get further rows
// for
//    their guesses, equally many at most, from what a step has besides a row for everyone.
// 2. Prefill chunks, lowest rank first, equal ranks in order of admission, while the predicted time stays under the
// target.
//    A slot that waits for its cached tokens is passed over. Where the step's floor is above the target anyway, prefill
//    may use what the floor leaves unused, as it costs nothing. If nothing decodes, prefill takes the whole step
//    (max_rows).
// No starvation: the first waiting slot gets at least kMinPrefillTokens in every step, however busy decoding is.
#pragma once

#include <cstdint>
#include <vector>

#include "millrace/worker/v1/worker.pb.h"
#include "worker/engine/engine_limits.h"
#include "worker/engine/slot_table.h"

namespace millrace {

inline constexpr int32_t kMinPrefillTokens = kBlockTokens;
// Tokens that the draft model reads in one step at most, of all sequences together: what it has missed, it catches up
// in pieces that delay nobody.
inline constexpr int32_t kMaxUnreadTokens = 256;

struct StepPlan {
  struct Chunk {
    int32_t slot;
    int32_t num_tokens;  // from its num_computed_tokens on
    // As the slot was when the step was planned.
    uint64_t order;  // of its admission: tells whether it is still the same sequence when results come
    int32_t end;     // its num_computed_tokens after the step; the least, until it is known how many guesses are right
    int32_t num_logit_rows;  // of the step
    bool samples;            // the last of them gives its next token
    bool is_decoding;
    int32_t num_guesses;  // its last rows are guesses; they and the one before each give a token
    int32_t num_unread;   // tokens that the draft model reads before; those it guesses from included
  };
  std::vector<Chunk> chunks;     // decoding slots first
  int32_t num_decode_rows = 0;   // guesses included
  int32_t num_guesses = 0;       // of all chunks
  std::vector<int32_t> stalled;  // decoding slots without room
};

StepPlan PackStep(const SlotTable& table, const EngineLimits& limits, const worker::v1::StepCost& cost,
                  double target_us);

// Logit rows of a chunk of n tokens: one per prompt log-probability it yields, and one to sample from when it reaches
// the end.
int32_t NumLogitRows(const Slot& slot, int32_t num_tokens);

}  // namespace millrace
