// `millrace chat`: a conversation, line by line.
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "cli/command.h"
#include "cli/completion.h"
#include "cli/connection.h"
#include "cli/interrupt.h"
#include "millrace/v1/inference.grpc.pb.h"

namespace millrace {
namespace {

constexpr char kCommands[] =
    "/reset         forget the conversation\n"
    "/system TEXT   start over with this system message\n"
    "/quit          end (so does Ctrl-D); Ctrl-C stops an answer\n";

struct Options {
  Endpoint endpoint;
  std::string model, system;
  int64_t max_tokens = 0, seed = 0;
  double temperature = 1, top_p = 1;
};

class Conversation {
 public:
  Conversation(v1::InferenceService::Stub& stub, Interrupt& interrupt, v1::GenerateRequest request, std::string system,
               Terminal terminal)
      : stub_(stub),
        interrupt_(interrupt),
        request_(std::move(request)),
        system_(std::move(system)),
        terminal_(terminal) {
    Reset();
  }

  // False when the user wants to end.
  bool Take(absl::string_view line) {
    if (!absl::StartsWith(line, "/")) {
      if (!line.empty()) Ask(line);
    } else if (line == "/quit") {
      return false;
    } else if (line == "/reset") {
      Reset();
    } else if (line == "/system" || absl::ConsumePrefix(&line, "/system ")) {
      system_ = line == "/system" ? "" : std::string(line);
      Reset();
    } else {
      terminal_.err << kCommands << std::flush;
    }
    return true;
  }
  bool failed() const { return failed_; }  // any answer

 private:
  void Reset() {
    request_.mutable_chat()->clear_messages();
    if (!system_.empty()) Say("system", system_);
  }
  void Say(absl::string_view role, absl::string_view text) {
    v1::ChatMessage& message = *request_.mutable_chat()->add_messages();
    message.set_role(std::string(role));
    message.set_content(std::string(text));
  }

  void Ask(absl::string_view text) {
    Say("user", text);
    grpc::ClientContext context;
    interrupt_.Watch(&context);
    const auto reader = stub_.Generate(&context, request_);
    std::string answer;
    v1::GenerateResponse piece;
    v1::Finish finish;
    while (reader->Read(&piece)) {
      answer += piece.text();
      terminal_.out << piece.text() << std::flush;
      if (piece.has_finish()) finish = piece.finish();
    }
    const grpc::Status status = reader->Finish();
    interrupt_.Watch(nullptr);
    terminal_.out << std::endl;
    const bool interrupted = status.error_code() == grpc::StatusCode::CANCELLED;
    if (!status.ok() && !interrupted) {
      failed_ = true;
      Fail(terminal_, ToAbsl(status));
    }
    if (status.ok() || (interrupted && !answer.empty())) {
      Say("assistant", answer);
    } else {
      request_.mutable_chat()->mutable_messages()->RemoveLast();  // the question may be asked again
    }
    if (status.ok()) ShowFigures(finish);
  }

  void ShowFigures(const v1::Finish& finish) {
    const v1::Usage& usage = finish.usage();
    std::string speed;
    if (usage.generated_tokens() > 1 && finish.timing().decode_us() > 0) {
      speed = absl::StrFormat(", %.1f tok/s", (usage.generated_tokens() - 1) * 1e6 / finish.timing().decode_us());
    }
    terminal_.err << absl::StrCat("[", usage.generated_tokens(), " tokens", speed, ", prompt ", usage.prompt_tokens(),
                                  ", cached ", usage.cached_tokens(), "]")
                  << std::endl;
  }

  v1::InferenceService::Stub& stub_;
  Interrupt& interrupt_;
  v1::GenerateRequest request_;  // holds the conversation
  std::string system_;
  const Terminal terminal_;
  bool failed_ = false;
};

v1::GenerateRequest Prepare(const Options& options, bool seed_given) {
  v1::GenerateRequest request;
  request.set_model(options.model);
  v1::SamplingParams& sampling = *request.mutable_sampling();
  if (options.max_tokens > 0) sampling.set_max_tokens(static_cast<int32_t>(options.max_tokens));
  sampling.set_temperature(static_cast<float>(options.temperature));
  sampling.set_top_p(static_cast<float>(options.top_p));
  if (seed_given) sampling.set_seed(static_cast<uint64_t>(options.seed));
  return request;
}

}  // namespace

int RunChat(Words words, Terminal terminal) {
  Options options;
  Arguments arguments("chat [--flag value]…", "A conversation with a model; /help lists what can be done in it.",
                      "millrace chat --router 127.0.0.1:7400 --system 'You answer in one sentence.'");
  AddEndpoint(arguments, &options.endpoint);
  arguments.Add("model", &options.model, "which model, where several are served");
  arguments.Add("system", &options.system, "the system message");
  arguments.Add("max_tokens", &options.max_tokens, 0, 1 << 30, "tokens of an answer; 0: what the context allows");
  arguments.Add("temperature", &options.temperature, 0, 100, "0: greedy");
  arguments.Add("top_p", &options.top_p, 0, 1, "keep the likeliest tokens of this much probability");
  arguments.Add("seed", &options.seed, 0, INT64_MAX, "the same seed gives the same answers (default: drawn)");
  if (const int code = ParseOrExit(arguments, words, terminal); code >= 0) return code;
  if (absl::Status status = CheckEndpoint(options.endpoint); !status.ok()) return Fail(terminal, status, kExitUsage);
  Interrupt interrupt;
  auto channel = Connect(options.endpoint);
  if (!channel.ok()) return Fail(terminal, channel.status());
  const auto stub = v1::InferenceService::NewStub(*channel);
  Conversation conversation(*stub, interrupt, Prepare(options, arguments.given("seed")), options.system, terminal);
  const bool interactive = &terminal.in == &std::cin && isatty(STDIN_FILENO);
  std::string line;
  while (true) {
    if (interactive) terminal.out << "> " << std::flush;
    if (!std::getline(terminal.in, line)) break;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!conversation.Take(line)) break;
  }
  return conversation.failed() && !interactive ? kExitFailed : kExitOk;
}

}  // namespace millrace
