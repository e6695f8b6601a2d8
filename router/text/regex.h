// One regular expression of a tokenizer.json, run by PCRE2 over valid UTF-8 with Unicode classes. `\s` and `\S` mean
// Unicode's White_Space as in the tokenizers library (PCRE2's own `\s` also takes U+180E). Compiled once, by the JIT
// where there is one, then constant and safe for any number of threads. The only place that sees pcre2.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace millrace {

class Regex {
 public:
  static absl::StatusOr<std::unique_ptr<Regex>> Compile(std::string_view pattern);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  // Calls `match(begin, end)` for every non-empty match, left to right. RESOURCE_EXHAUSTED when the pattern backtracks
  // without end on this text.
  absl::Status ForEachMatch(std::string_view text, absl::FunctionRef<void(size_t begin, size_t end)> match) const;

 private:
  struct Code;
  explicit Regex(std::unique_ptr<Code> code);
  std::unique_ptr<Code> code_;
};

}  // namespace millrace
