// `millrace status`: the router's and its workers' figures, once or as they change.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "cli/command.h"
#include "cli/completion.h"
#include "cli/connection.h"
#include "google/protobuf/util/json_util.h"
#include "millrace/v1/admin.grpc.pb.h"

namespace millrace {
namespace {

struct Options {
  Endpoint endpoint;
  bool watch = false, json = false;
};

std::string RouterLines(const v1::RouterStatus& router) {
  const absl::Duration uptime = absl::Trunc(absl::Microseconds(router.uptime_us()), absl::Seconds(1));
  const double hit = router.prompt_tokens() > 0 ? 100.0 * router.cached_tokens() / router.prompt_tokens() : 0;
  return absl::StrFormat(
      "router %s  version %s  epoch %d  up %s\n"
      "streams %d  waiting %d  running %d  finished %d  preempted %d\n"
      "generated tokens %d  prompt tokens %d  cached %.1f %%\n\n",
      router.router_id(), router.version(), router.epoch(), absl::FormatDuration(uptime), router.open_streams(),
      router.waiting_sequences(), router.running_sequences(), router.finished_sequences(), router.preemptions(),
      router.generated_tokens(), router.prompt_tokens(), hit);
}

std::string Table(const v1::GetStatusResponse& status) {
  constexpr char kHeader[] = "%-20s %-10s %11s %9s %9s %9s %9s %12s %8s %10s %10s %6s  %s\n";
  std::string text = RouterLines(status.router());
  absl::StrAppend(&text, absl::StrFormat(kHeader, "worker", "state", "slots", "used", "cached", "free", "returning",
                                         "steps", "step ms", "drafted", "accepted", "length", "model"));
  for (const v1::WorkerStatus& worker : status.workers()) {
    absl::string_view state = v1::WorkerStatus::State_Name(worker.state());
    absl::ConsumePrefix(&state, "STATE_");
    absl::StrAppend(&text, absl::StrFormat("%-20s %-10s %5d/%-5d %9d %9d %9d %9d %12d %8.1f %10d %10d %6.1f  %s\n",
                                           worker.worker_id().empty() ? worker.address() : worker.worker_id(), state,
                                           worker.used_slots(), worker.num_slots(), worker.used_blocks(),
                                           worker.cached_blocks(), worker.free_blocks(), worker.quarantined_blocks(),
                                           worker.steps(), worker.last_step_us() / 1000.0, worker.drafted_tokens(),
                                           worker.accepted_tokens(), worker.draft_length(), worker.model()));
    if (!worker.last_error().empty()) absl::StrAppend(&text, "  ", worker.address(), ": ", worker.last_error(), "\n");
  }
  return text;
}

absl::StatusOr<std::string> Show(v1::AdminService::Stub& stub, bool json) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::GetStatusResponse response;
  const grpc::Status status = stub.GetStatus(&context, {}, &response);
  if (!status.ok()) return ToAbsl(status);
  if (!json) return Table(response);
  google::protobuf::util::JsonPrintOptions print;
  print.preserve_proto_field_names = true;
  print.always_print_primitive_fields = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(response, &text, print).ok())
    return absl::InternalError("no JSON form");
  return text + "\n";
}

}  // namespace

int RunStatus(Words words, Terminal terminal) {
  Options options;
  Arguments arguments("status [--flag value]…", "Shows what the router and its workers are doing.",
                      "millrace status --router 127.0.0.1:7400 --watch");
  AddEndpoint(arguments, &options.endpoint);
  arguments.Add("watch", &options.watch, "again every second, until Ctrl-C");
  arguments.Add("json", &options.json, "one JSON object (the proto's GetStatusResponse) a line");
  if (const int code = ParseOrExit(arguments, words, terminal); code >= 0) return code;
  if (absl::Status status = CheckEndpoint(options.endpoint); !status.ok()) return Fail(terminal, status, kExitUsage);
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  if (options.watch) pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  auto channel = Connect(options.endpoint);
  if (!channel.ok()) return Fail(terminal, channel.status());
  const auto stub = v1::AdminService::NewStub(*channel);
  const bool clear = options.watch && !options.json && &terminal.out == &std::cout && isatty(STDOUT_FILENO);
  const timespec second = {1, 0};
  do {
    const absl::StatusOr<std::string> text = Show(*stub, options.json);
    if (!text.ok()) return Fail(terminal, text.status());
    terminal.out << (clear ? "\x1b[H\x1b[J" : "") << *text << std::flush;
    if (!terminal.out.good()) return kExitFailed;
  } while (options.watch && sigtimedwait(&ends, nullptr, &second) < 0);
  return kExitOk;
}

}  // namespace millrace
