#include "router/text/pre_tokenizer.h"

#include <string>

namespace millrace {

absl::Status PreTokenizer::Split(std::string_view text, absl::FunctionRef<void(std::string_view)> piece) const {
  if (text.empty()) return absl::OkStatus();
  if (add_prefix_space_ && text.front() != ' ') return SplitFrom(0, std::string(" ").append(text), piece);
  return SplitFrom(0, text, piece);
}

absl::Status PreTokenizer::SplitFrom(size_t stage, std::string_view text,
                                     absl::FunctionRef<void(std::string_view)> piece) const {
  if (stage == stages_.size()) {
    piece(text);
    return absl::OkStatus();
  }
  using Keep = PreTokenizerStage::Keep;
  const Keep keep = stages_[stage].keep;
  absl::Status status;
  size_t done = 0;
  const auto emit = [&](size_t begin, size_t end, Keep unwanted) {
    if (begin == end || keep == unwanted || !status.ok()) return;
    status.Update(SplitFrom(stage + 1, text.substr(begin, end - begin), piece));
  };
  absl::Status matched = stages_[stage].regex->ForEachMatch(text, [&](size_t begin, size_t end) {
    emit(done, begin, Keep::kMatches);
    emit(begin, end, Keep::kGaps);
    done = end;
  });
  if (!matched.ok()) return matched;
  emit(done, text.size(), Keep::kMatches);
  return status;
}

}  // namespace millrace
