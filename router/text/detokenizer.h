// Token ids to text as they come, one per output stream. What Append has given out never changes: an unfinished
// character waits for its rest. Holds at most three bytes back. Single-threaded; must not outlive its tokenizer.
#pragma once

#include <cstdint>
#include <string>

#include "router/text/tokenizer.h"

namespace millrace {

class Detokenizer {
 public:
  Detokenizer(const Tokenizer& tokenizer, bool skip_special) : tokenizer_(tokenizer), skip_special_(skip_special) {}

  std::string Append(int32_t id);
  // The end of the stream: U+FFFD if a character was left unfinished.
  std::string Finish();

 private:
  const Tokenizer& tokenizer_;
  const bool skip_special_;
  std::string unfinished_;
};

}  // namespace millrace
