// What slots guess of their next tokens, where it is looked up and not computed by a model. Pure functions; used by the
// engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/tensor.h"

namespace millrace {

// `max_count` tokens, or none: what followed when the sequence ended as it does now before, at the latest of the places
// that agree with its end in the most tokens, of at least kMinLookup and at most kMaxLookup; past its end they repeat
// themselves. Prompt lookup (Saxena, 2023). O(tokens).
inline constexpr int32_t kMinLookup = 2, kMaxLookup = 8;
std::vector<int32_t> LookUpDraft(Vec<const int32_t> tokens, int32_t max_count);

}  // namespace millrace
