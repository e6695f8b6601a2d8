#include "router/text/detokenizer.h"

#include "router/text/utf8.h"

namespace millrace {

std::string Detokenizer::Append(int32_t id) {
  std::string text;
  if (skip_special_ && tokenizer_.IsSpecial(id)) return text;
  unfinished_ += tokenizer_.TokenBytes(id);
  const size_t left = AppendLossyUtf8(unfinished_, text);
  unfinished_.erase(0, unfinished_.size() - left);
  return text;
}

std::string Detokenizer::Finish() {
  std::string text(unfinished_.empty() ? "" : kReplacementCharacter);
  unfinished_.clear();
  return text;
}

}  // namespace millrace
