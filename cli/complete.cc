// `millrace complete`: one prompt with its text as it comes, or --jsonl: a request a line in, an answer a line out.
#include <iterator>
#include <memory>

#include "absl/strings/str_cat.h"
#include "cli/command.h"
#include "cli/completion.h"
#include "cli/completion_call.h"
#include "cli/connection.h"
#include "cli/ordered_lines.h"
#include "cli/request_json.h"

namespace millrace {
namespace {

struct Options {
  Endpoint endpoint;
  std::string prompt, text, model;
  bool jsonl = false;
  int64_t concurrency = 1, max_tokens = 0, top_k = 0, seed = 0;
  double temperature = 1, top_p = 1;
};

void Describe(Options& options, Arguments& arguments) {
  arguments.TakePositional(&options.text);
  AddEndpoint(arguments, &options.endpoint);
  arguments.Add("jsonl", &options.jsonl, "read one JSON request a line from stdin, write one JSON answer a line");
  arguments.Add("concurrency", &options.concurrency, 1, 100000, "with --jsonl: requests at a time");
  arguments.Add("prompt", &options.prompt, "the prompt; - reads it from stdin");
  arguments.Add("model", &options.model, "which model, where several are served");
  arguments.Add("max_tokens", &options.max_tokens, 0, 1 << 30, "tokens at most; 0: what the context allows");
  arguments.Add("temperature", &options.temperature, 0, 100, "0: greedy");
  arguments.Add("top_p", &options.top_p, 0, 1, "keep the likeliest tokens of this much probability");
  arguments.Add("top_k", &options.top_k, 0, 1 << 30, "keep this many likeliest tokens; 0: all");
  arguments.Add("seed", &options.seed, 0, INT64_MAX, "the same seed gives the same tokens (default: drawn)");
}

absl::Status Check(const Options& options, const Arguments& arguments) {
  if (absl::Status status = CheckEndpoint(options.endpoint); !status.ok()) return status;
  const bool text = arguments.given("prompt") || !options.text.empty();
  if (options.jsonl) {
    for (const char* flag : {"prompt", "model", "max_tokens", "temperature", "top_p", "top_k", "seed"}) {
      if (arguments.given(flag) || !options.text.empty()) {
        return absl::InvalidArgumentError("--jsonl takes prompts and sampling from stdin alone");
      }
    }
  } else if (!text) {
    return absl::InvalidArgumentError("no prompt: give a text, --prompt or --jsonl");
  } else if (arguments.given("prompt") && !options.text.empty()) {
    return absl::InvalidArgumentError("both --prompt and a text given");
  } else if (arguments.given("concurrency")) {
    return absl::InvalidArgumentError("--concurrency goes with --jsonl");
  }
  return absl::OkStatus();
}

int CompleteLines(v1::InferenceService::Stub& stub, size_t concurrency, Terminal terminal) {
  OrderedLines lines(terminal.out, concurrency);
  std::string line;
  while (std::getline(terminal.in, line)) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const uint64_t number = lines.Reserve();
    absl::StatusOr<CompletionRequest> parsed = ParseCompletion(line);
    if (!parsed.ok()) {
      lines.Finish(number, DumpLine(ErrorJson(parsed.status())));
      continue;
    }
    std::optional<std::chrono::milliseconds> timeout;
    if (parsed->deadline_ms.has_value()) timeout = std::chrono::milliseconds(*parsed->deadline_ms);
    const bool several = parsed->request.sampling().n() > 1;
    auto completion = std::make_shared<Completion>();  // held by the two callbacks of one call
    CompletionCall::Start(
        stub, std::move(parsed->request), timeout,
        [completion](const v1::GenerateResponse& piece) { completion->Add(piece); },
        [&lines, number, completion, several](const grpc::Status& status) {
          lines.Finish(number, DumpLine(completion->Json(status, several)));
        });
  }
  lines.WaitForAll();
  return terminal.out.good() ? kExitOk : kExitFailed;
}

int CompleteText(v1::InferenceService::Stub& stub, const Options& options, const Arguments& arguments,
                 Terminal terminal) {
  v1::GenerateRequest request;
  request.set_model(options.model);
  request.set_text(options.text.empty() ? options.prompt : options.text);
  if (options.prompt == "-" && options.text.empty()) {
    request.set_text(std::string(std::istreambuf_iterator<char>(terminal.in), {}));
  }
  v1::SamplingParams& sampling = *request.mutable_sampling();
  if (options.max_tokens > 0) sampling.set_max_tokens(static_cast<int32_t>(options.max_tokens));
  sampling.set_temperature(static_cast<float>(options.temperature));
  sampling.set_top_p(static_cast<float>(options.top_p));
  sampling.set_top_k(static_cast<int32_t>(options.top_k));
  if (arguments.given("seed")) sampling.set_seed(static_cast<uint64_t>(options.seed));
  grpc::ClientContext context;
  const auto reader = stub.Generate(&context, request);
  v1::GenerateResponse piece;
  while (reader->Read(&piece)) terminal.out << piece.text() << std::flush;
  const grpc::Status status = reader->Finish();
  terminal.out << std::endl;
  return status.ok() ? kExitOk : Fail(terminal, ToAbsl(status));
}

}  // namespace

int RunComplete(Words words, Terminal terminal) {
  Options options;
  Arguments arguments(
      "complete [--flag value]… [TEXT]", "Completes a prompt and prints the text as it comes.",
      "echo '{\"prompt\": \"Water\", \"max_tokens\": 8}' | millrace complete --router 127.0.0.1:7400 --jsonl");
  Describe(options, arguments);
  if (const int code = ParseOrExit(arguments, words, terminal); code >= 0) return code;
  if (absl::Status status = Check(options, arguments); !status.ok()) return Fail(terminal, status, kExitUsage);
  auto channel = Connect(options.endpoint);
  if (!channel.ok()) return Fail(terminal, channel.status());
  const auto stub = v1::InferenceService::NewStub(*channel);
  if (options.jsonl) return CompleteLines(*stub, static_cast<size_t>(options.concurrency), terminal);
  return CompleteText(*stub, options, arguments, terminal);
}

}  // namespace millrace
