// The subcommands. Each lives for one call on the main thread and takes the words after its name; the streams are
// arguments so that a test can drive a command whole.
#pragma once

#include <istream>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cli/arguments.h"

namespace millrace {

inline constexpr int kExitOk = 0, kExitFailed = 1, kExitUsage = 2;
inline constexpr absl::string_view kDefaultRouter = "127.0.0.1:7400";

struct Terminal {
  std::istream& in;
  std::ostream& out;
  std::ostream& err;
};
using Words = absl::Span<const std::string>;

int RunUp(Words words, Terminal terminal);
int RunComplete(Words words, Terminal terminal);
int RunTokenize(Words words, Terminal terminal);
int RunChat(Words words, Terminal terminal);
int RunStatus(Words words, Terminal terminal);
int RunBench(Words words, Terminal terminal);

// Prints "millrace: MESSAGE" on stderr and returns `code`.
int Fail(Terminal terminal, const absl::Status& status, int code = kExitFailed);
// Parses, then shows help or the error: an exit code where the command ends here, -1 where it goes on.
int ParseOrExit(Arguments& arguments, Words words, Terminal terminal);

}  // namespace millrace
