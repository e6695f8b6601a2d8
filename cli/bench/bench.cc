// `millrace bench`: plans a workload, sends it, prints what was measured.
#include <unistd.h>

#include <fstream>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/bench/load.h"
#include "cli/command.h"
#include "cli/completion.h"
#include "cli/connection.h"

namespace millrace {
namespace {

struct Options {
  Endpoint endpoint;
  WorkloadOptions plan;
  int64_t concurrency = 0, timeout_s = 600, seed = 0;
  double temperature = 0;
  std::string trace, json;
  Measurements::Slo slo;
};

void Describe(Options& options, Arguments& arguments) {
  WorkloadOptions& plan = options.plan;
  AddEndpoint(arguments, &options.endpoint);
  arguments.Add("workload", &plan.workload, "synthetic, shared_prefix or trace");
  arguments.Add("max_requests", &plan.num_requests, 1, 10'000'000, "how many requests; of a trace, at most");
  arguments.Add("rate", &plan.rate, 0, 1e6, "open loop: Poisson arrivals a second");
  arguments.Add("concurrency", &options.concurrency, 0, 100'000, "closed loop: requests at a time");
  arguments.Add("input_tokens", &plan.input_tokens, 1, 1 << 21, "tokens of a prompt");
  arguments.Add("output_tokens", &plan.output_tokens, 1, 1 << 21, "tokens of an answer");
  arguments.Add("groups", &plan.groups, 1, 1 << 20, "shared_prefix: how many prefixes");
  arguments.Add("prefix_tokens", &plan.prefix_tokens, 1, 1 << 21, "shared_prefix: tokens of a prefix");
  arguments.Add("trace", &options.trace, "trace: file in the Mooncake format, one JSON object a line");
  arguments.Add("speed", &plan.speed, 1e-3, 1e6, "trace: its times run so much faster");
  arguments.Add("scale", &plan.scale, 1e-4, 100, "trace: its lengths are multiplied by this");
  arguments.Add("seed", &options.seed, 0, INT64_MAX, "of arrivals and prompts; another one finds no prompt cached");
  arguments.Add("temperature", &options.temperature, 0, 100, "0: greedy");
  arguments.Add("timeout_s", &options.timeout_s, 1, 86'400, "a request that takes longer has failed");
  arguments.Add("ttft_slo_ms", &options.slo.ttft_ms, 0, 1e9, "goodput: longest time to the first token");
  arguments.Add("itl_slo_ms", &options.slo.itl_ms, 0, 1e9, "goodput: longest mean time per further token");
  arguments.Add("json", &options.json, "write the summary as JSON to this file; -: to stdout, instead of the table");
}

absl::Status Check(const Options& options, const Arguments& arguments) {
  if (absl::Status status = CheckEndpoint(options.endpoint); !status.ok()) return status;
  const std::string& workload = options.plan.workload;
  if (workload != "synthetic" && workload != "shared_prefix" && workload != "trace") {
    return absl::InvalidArgumentError(
        absl::StrCat("--workload takes synthetic, shared_prefix or trace, not '", workload, "'"));
  }
  if (options.plan.rate > 0 && options.concurrency > 0) {
    return absl::InvalidArgumentError("--rate is an open loop, --concurrency a closed one: give one of them");
  }
  if ((workload == "trace") != !options.trace.empty()) {
    return absl::InvalidArgumentError("--workload trace and --trace FILE go together");
  }
  const auto refuse = [&](std::initializer_list<const char*> flags, const char* where) -> absl::Status {
    for (const char* flag : flags) {
      if (arguments.given(flag))
        return absl::InvalidArgumentError(absl::StrCat("--", flag, " goes with --workload ", where));
    }
    return absl::OkStatus();
  };
  if (workload != "trace") {
    if (absl::Status status = refuse({"speed", "scale"}, "trace"); !status.ok()) return status;
  } else if (absl::Status status = refuse({"input_tokens", "output_tokens"}, "synthetic or shared_prefix");
             !status.ok()) {
    return status;
  }
  return workload == "shared_prefix" ? absl::OkStatus() : refuse({"groups", "prefix_tokens"}, "shared_prefix");
}

absl::StatusOr<std::vector<PlannedRequest>> Plan(const Options& options) {
  if (options.trace.empty()) return PlanSynthetic(options.plan);
  std::ifstream lines(options.trace);
  if (!lines) return absl::InvalidArgumentError(absl::StrCat("--trace ", options.trace, ": cannot be read"));
  return PlanTrace(lines, options.plan);
}

std::function<void(size_t)> ProgressBar(size_t total, Terminal terminal) {
  if (&terminal.err != &std::cerr || !isatty(STDERR_FILENO)) return nullptr;
  return [total](size_t done) {
    constexpr size_t kWidth = 40;
    const size_t filled = kWidth * done / total;
    std::cerr << absl::StrFormat("\r[%s%s] %d/%d", std::string(filled, '#'), std::string(kWidth - filled, '.'), done,
                                 total)
              << std::flush;
  };
}

absl::Status Write(const nlohmann::ordered_json& summary, const std::string& json, Terminal terminal) {
  if (json == "-") {
    terminal.out << DumpLine(summary) << std::endl;
    return absl::OkStatus();
  }
  terminal.out << SummaryTable(summary) << std::flush;
  if (json.empty()) return absl::OkStatus();
  std::ofstream file(json);
  file << DumpLine(summary) << std::endl;
  return file ? absl::OkStatus() : absl::UnknownError(absl::StrCat("--json ", json, ": cannot be written"));
}

}  // namespace

int RunBench(Words words, Terminal terminal) {
  Options options;
  Arguments arguments(
      "bench [--flag value]…",
      "Measures latency, throughput and cache hits. Open loop with --rate or a trace, else closed (--concurrency).",
      "millrace bench --router 127.0.0.1:7400 --rate 4 --max_requests 200 --input_tokens 512 --ttft_slo_ms 500");
  Describe(options, arguments);
  if (const int code = ParseOrExit(arguments, words, terminal); code >= 0) return code;
  if (absl::Status status = Check(options, arguments); !status.ok()) return Fail(terminal, status, kExitUsage);
  options.plan.seed = static_cast<uint64_t>(options.seed);
  const absl::StatusOr<std::vector<PlannedRequest>> plan = Plan(options);
  if (!plan.ok()) return Fail(terminal, plan.status(), kExitUsage);
  auto channel = Connect(options.endpoint);
  if (!channel.ok()) return Fail(terminal, channel.status());
  const auto stub = v1::InferenceService::NewStub(*channel);

  grpc::ClientContext context;
  v1::ListModelsResponse models;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  const grpc::Status listed = stub->ListModels(&context, {}, &models);
  if (!listed.ok()) return Fail(terminal, ToAbsl(listed));
  if (models.models_size() == 0 || models.models(0).vocab_size() == 0) {
    return Fail(terminal, absl::FailedPreconditionError(absl::StrCat(options.endpoint.router, " serves no model")));
  }
  LoadOptions load;
  const bool open_loop = options.plan.rate > 0 || (!options.trace.empty() && options.concurrency == 0);
  load.concurrency = open_loop ? 0 : static_cast<size_t>(std::max<int64_t>(options.concurrency, 1));
  load.vocab_size = models.models(0).vocab_size();
  load.temperature = options.temperature;
  load.timeout = absl::Seconds(options.timeout_s);
  const auto progress = ProgressBar(plan->size(), terminal);
  double seconds = 0;
  const Measurements measurements = Load(*stub, load, progress).Run(*plan, seconds);
  if (progress) std::cerr << "\r\x1b[K" << std::flush;
  nlohmann::ordered_json summary = measurements.Summary(seconds, options.slo);
  summary["workload"] = options.plan.workload;
  summary["loop"] = open_loop ? "open" : "closed";
  if (absl::Status status = Write(summary, options.json, terminal); !status.ok()) return Fail(terminal, status);
  return summary["completed"].get<size_t>() > 0 ? kExitOk : kExitFailed;
}

}  // namespace millrace
