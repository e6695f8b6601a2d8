#include "cli/command.h"

namespace millrace {

int Fail(Terminal terminal, const absl::Status& status, int code) {
  terminal.err << "millrace: ";
  if (code == kExitFailed && !absl::IsUnavailable(status))
    terminal.err << absl::StatusCodeToString(status.code()) << ": ";
  terminal.err << std::string(status.message()) << std::endl;
  return code;
}

int ParseOrExit(Arguments& arguments, Words words, Terminal terminal) {
  const std::string help = arguments.Help();  // before parsing: it shows the defaults
  if (absl::Status parsed = arguments.Parse(words); !parsed.ok()) return Fail(terminal, parsed, kExitUsage);
  if (!arguments.help_wanted()) return -1;
  terminal.out << help;
  return kExitOk;
}

}  // namespace millrace
