// A subcommand's flags as one table: name, where the value goes, its limits, its help. The table lives for one parse
// and points into an options struct whose initial values are the defaults. `--name value`, `--name=value`, `--` ends
// flags.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace millrace {

class Arguments {
 public:
  // `usage` is the line after "usage: millrace ", `about` one sentence, `example` a whole command line.
  Arguments(absl::string_view usage, absl::string_view about, absl::string_view example)
      : usage_(usage), about_(about), example_(example) {}

  void Add(absl::string_view name, std::string* value, absl::string_view help);
  void Add(absl::string_view name, bool* value, absl::string_view help);
  void Add(absl::string_view name, int64_t* value, int64_t least, int64_t most, absl::string_view help);
  void Add(absl::string_view name, double* value, double least, double most, absl::string_view help);
  void TakePositional(std::string* value) { positional_ = value; }  // at most one; not set: none is allowed

  // INVALID_ARGUMENT names the flag, the value and the limit; an unknown flag comes with its nearest neighbour.
  absl::Status Parse(absl::Span<const std::string> words);
  bool help_wanted() const { return help_wanted_; }
  bool given(absl::string_view name) const;  // on the command line, whatever its value
  std::string Help() const;

 private:
  struct Flag {
    absl::string_view name, help;
    std::variant<std::string*, bool*, int64_t*, double*> value;
    double least = 0, most = 0;
    bool given = false;
  };
  Flag* Find(absl::string_view name);
  absl::Status Unknown(absl::string_view name) const;

  absl::string_view usage_, about_, example_;
  std::vector<Flag> flags_;
  std::string* positional_ = nullptr;
  bool help_wanted_ = false;
};

// The word of `words` with the fewest edits to `word`; empty when none is within half its length.
absl::string_view ClosestWord(absl::string_view word, absl::Span<const absl::string_view> words);

// HOST:PORT with a port of 1 … 65535; a literal IPv6 host stands in brackets.
absl::Status CheckAddress(absl::string_view flag, absl::string_view address);

}  // namespace millrace
