// What slots guess of their next tokens, where it is looked up and not computed by a model. Pure functions; used by the
// engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/tensor.h"
#include "worker/engine/draft_table.h"

namespace millrace {

// `max_count` tokens, or none: what followed when the sequence ended as it does now before, at the latest of the places
// that agree with its end in the most tokens, of at least `least` and at most kMaxLookup; past its end they repeat
// themselves. Prompt lookup (Saxena, 2023). O(tokens).
inline constexpr int32_t kMinLookup = 2, kSureLookup = 4, kMaxLookup = 8;
std::vector<int32_t> LookUpDraft(Vec<const int32_t> tokens, int32_t max_count, int32_t least = kMinLookup);

// At most `max_count` tokens: what the sequence itself says where it agrees with its end in kSureLookup tokens, else
// what the model usually says, if a table knows, else what the sequence says after fewer.
std::vector<int32_t> Guess(Vec<const int32_t> tokens, int32_t max_count, const DraftTable* table);

}  // namespace millrace
