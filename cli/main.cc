// The binary `millrace`: picks the subcommand.
#include <algorithm>
#include <array>
#include <iostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cli/command.h"

namespace millrace {
namespace {

struct Command {
  absl::string_view name, about;
  int (*run)(Words, Terminal);
};
constexpr std::array<Command, 6> kCommands = {{
    {"up", "start a cluster on this machine: a router and its workers", RunUp},
    {"chat", "talk to a model", RunChat},
    {"complete", "complete a prompt, or one JSON request a line", RunComplete},
    {"tokenize", "tokenize, detokenize and render chats without a cluster", RunTokenize},
    {"status", "show what the cluster is doing", RunStatus},
    {"bench", "measure latency and throughput", RunBench},
}};

void PrintHelp(std::ostream& out) {
  out << "usage: millrace COMMAND [--flag value]…\n\n";
  for (const Command& command : kCommands) {
    out << "  " << command.name << std::string(10 - command.name.size(), ' ') << command.about << "\n";
  }
  out << "\n`millrace COMMAND --help` lists a command's flags.\n\nexample:\n"
         "  millrace up --model models/smollm2 --port 7400 &\n  millrace chat --router 127.0.0.1:7400\n";
}

int Main(std::vector<std::string> words) {
  const Terminal terminal{std::cin, std::cout, std::cerr};
  if (words.empty()) {
    PrintHelp(std::cerr);
    return kExitUsage;
  }
  if (words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    PrintHelp(std::cout);
    return kExitOk;
  }
  std::vector<absl::string_view> names;
  for (const Command& command : kCommands) {
    if (command.name == words[0]) return command.run(Words(words).subspan(1), terminal);
    names.push_back(command.name);
  }
  const absl::string_view closest = ClosestWord(words[0], names);
  return Fail(terminal,
              absl::InvalidArgumentError(absl::StrCat("unknown command '", words[0], "'",
                                                      closest.empty() ? "; see millrace --help" : "; did you mean ",
                                                      closest, closest.empty() ? "" : "?")),
              kExitUsage);
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) { return millrace::Main(std::vector<std::string>(argv + 1, argv + argc)); }
