#include "worker/engine/drafting.h"

#include <algorithm>

namespace millrace {

std::vector<int32_t> LookUpDraft(Vec<const int32_t> tokens, int32_t max_count, int32_t least) {
  const int64_t size = tokens.size;
  int64_t best_end = 0;
  int32_t best_length = least - 1;
  for (int64_t end = size - 1; end >= least && best_length < kMaxLookup; --end) {
    if (tokens[end - 1] != tokens[size - 1]) continue;
    int32_t length = 1;
    while (length < kMaxLookup && length < end && tokens[end - 1 - length] == tokens[size - 1 - length]) ++length;
    if (length <= best_length) continue;
    best_length = length;
    best_end = end;
  }
  if (best_length < least) return {};
  std::vector<int32_t> draft;
  for (int64_t i = best_end; i < best_end + max_count; ++i) {
    draft.push_back(i < size ? tokens[i] : draft[static_cast<size_t>(i - size)]);
  }
  return draft;
}

std::vector<int32_t> Guess(Vec<const int32_t> tokens, int32_t max_count, const DraftTable* table) {
  if (table == nullptr) return LookUpDraft(tokens, max_count);
  std::vector<int32_t> draft = LookUpDraft(tokens, max_count, kSureLookup);
  if (draft.empty()) draft = table->Draft(tokens, max_count);
  return draft.empty() ? LookUpDraft(tokens, max_count) : draft;
}

}  // namespace millrace
