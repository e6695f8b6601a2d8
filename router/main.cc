// millrace-router: flags, one RouterServer, and the wait for a signal. Prints `ready HOST:PORT` on stdout once it
// serves and a worker is ready. Exit code 2: it could not start with these flags.
#include <cstdio>
#include <iostream>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "google/protobuf/stubs/logging.h"
#include "router/api/router_server.h"
#include "service/address.h"
#include "service/grpc_log.h"
#include "service/log.h"
#include "service/signals.h"

ABSL_FLAG(std::string, model, "", "folder with tokenizer.json and the chat template");
ABSL_FLAG(std::string, model_name, "", "what clients call the model; default: the folder's name");
ABSL_FLAG(std::string, listen, millrace::RouterOptions().listen, "HOST:PORT to serve on; port 0: any free one");
ABSL_FLAG(std::string, metrics_listen, millrace::RouterOptions().metrics_listen,
          "HOST:PORT of /metrics; port 0: any free one; empty: none");
ABSL_FLAG(std::string, log_level, "info", "least that is logged: debug, info, warning or error");
ABSL_FLAG(std::vector<std::string>, workers, {},
          "HOST:PORT of every worker, separated by commas; dns:///HOST:PORT: all addresses behind the name, resolved "
          "again and again");
ABSL_FLAG(std::string, router_id, millrace::RouterOptions().router_id, "this router's name");
ABSL_FLAG(uint64_t, epoch, 0, "higher than that of earlier routers; 0: unix time in microseconds");
ABSL_FLAG(std::string, probe_listen, "",
          "HOST:PORT of health in plaintext, and of nothing else, for probes that have no certificate; empty: none");
ABSL_FLAG(std::string, tls_certificate, "", "PEM file: what the router shows to clients; empty: plaintext");
ABSL_FLAG(std::string, tls_key, "", "PEM file: its private key");
ABSL_FLAG(std::string, tls_ca, "", "PEM file: who must have signed clients' certificates; empty: they need none");
ABSL_FLAG(std::string, workers_tls_certificate, "", "PEM file: what the router shows to workers; empty: plaintext");
ABSL_FLAG(std::string, workers_tls_key, "", "PEM file: its private key");
ABSL_FLAG(std::string, workers_tls_ca, "", "PEM file: who must have signed workers' certificates");
ABSL_FLAG(std::vector<std::string>, worker_identity, millrace::RouterOptions().worker_identity,
          "DNS or URI names of which a worker's certificate has one");
ABSL_FLAG(std::string, tokens, "",
          "file of bearer tokens, one a line, with the tenant that it speaks for; empty: clients need none");
ABSL_FLAG(std::string, admin_tokens, "", "file of operators' bearer tokens; without it --tokens closes AdminService");
ABSL_FLAG(bool, unencrypted, false,
          "allow plaintext beyond this machine: whoever is on the way can read prompts and answers and use the router");
ABSL_FLAG(std::string, otlp_endpoint, "",
          "HOST:PORT of a collector of spans, OTLP over gRPC in plaintext; empty: none");
ABSL_FLAG(
    bool, unencrypted_spans, false,
    "allow a collector beyond this machine: whoever is on the way reads what requests are traced, not their text");
ABSL_FLAG(bool, unencrypted_metrics, false, "allow /metrics beyond this machine, in plaintext and for anybody");
ABSL_FLAG(int64_t, max_calls, millrace::RouterOptions().max_calls, "open Generate calls");
ABSL_FLAG(int64_t, max_request_bytes, millrace::RouterOptions().max_request_bytes,
          "memory for requests being received");
ABSL_FLAG(int64_t, max_queued_sequences, millrace::SchedulerOptions().max_queued_sequences, "sequences that wait");
ABSL_FLAG(int64_t, max_queued_tokens, millrace::SchedulerOptions().max_queued_tokens, "prompt tokens that wait");
ABSL_FLAG(std::string, speculation, millrace::RouterOptions().speculation,
          "auto: workers that can draft do so where that pays; off: never");
ABSL_FLAG(int64_t, drain_ms, millrace::RouterOptions().drain_ms, "how long open calls may go on after SIGTERM");

namespace millrace {
namespace {

RouterOptions OptionsFromFlags() {
  RouterOptions options;
  options.model = absl::GetFlag(FLAGS_model);
  options.model_name = absl::GetFlag(FLAGS_model_name);
  options.listen = absl::GetFlag(FLAGS_listen);
  options.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  options.workers = absl::GetFlag(FLAGS_workers);
  options.router_id = absl::GetFlag(FLAGS_router_id);
  options.epoch = absl::GetFlag(FLAGS_epoch);
  options.probe_listen = absl::GetFlag(FLAGS_probe_listen);
  options.tls = {absl::GetFlag(FLAGS_tls_certificate), absl::GetFlag(FLAGS_tls_key), absl::GetFlag(FLAGS_tls_ca)};
  options.workers_tls = {absl::GetFlag(FLAGS_workers_tls_certificate), absl::GetFlag(FLAGS_workers_tls_key),
                         absl::GetFlag(FLAGS_workers_tls_ca)};
  options.worker_identity = absl::GetFlag(FLAGS_worker_identity);
  options.tokens = absl::GetFlag(FLAGS_tokens);
  options.admin_tokens = absl::GetFlag(FLAGS_admin_tokens);
  options.unencrypted = absl::GetFlag(FLAGS_unencrypted);
  options.unencrypted_metrics = absl::GetFlag(FLAGS_unencrypted_metrics);
  options.otlp_endpoint = absl::GetFlag(FLAGS_otlp_endpoint);
  options.unencrypted_spans = absl::GetFlag(FLAGS_unencrypted_spans);
  options.max_calls = absl::GetFlag(FLAGS_max_calls);
  options.max_request_bytes = absl::GetFlag(FLAGS_max_request_bytes);
  options.drain_ms = absl::GetFlag(FLAGS_drain_ms);
  options.speculation = absl::GetFlag(FLAGS_speculation);
  options.scheduler.max_queued_sequences = absl::GetFlag(FLAGS_max_queued_sequences);
  options.scheduler.max_queued_tokens = absl::GetFlag(FLAGS_max_queued_tokens);
  return options;
}

// The port is known only after the server has started, and the first worker may be quicker.
class ReadyLine {
 public:
  void SetAddress(std::string address) {
    absl::MutexLock lock(&mutex_);
    address_ = std::move(address);
    PrintOnce();
  }
  void SetReady() {
    absl::MutexLock lock(&mutex_);
    ready_ = true;
    PrintOnce();
  }

 private:
  void PrintOnce() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ready_ && !address_.empty()) std::cout << "ready " << address_ << std::endl;
  }
  absl::Mutex mutex_;
  std::string address_ ABSL_GUARDED_BY(mutex_);
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;
};

int Run() {
  ShutdownSignals signals;
  // A debugging aid, on in builds like Debian's: every mutex would take one lock that all share.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // Protobuf logs every string that is not UTF-8; the client is told instead.
  google::protobuf::SetLogHandler(nullptr);
  const absl::StatusOr<LogLevel> level = ParseLogLevel(absl::GetFlag(FLAGS_log_level));
  if (!level.ok()) {
    std::cerr << "millrace-router: --log_level: " << level.status().message() << std::endl;
    return 2;
  }
  SetLogLevel(*level);
  TakeGrpcLog();
  const RouterOptions options = OptionsFromFlags();
  ReadyLine ready_line;
  absl::StatusOr<std::unique_ptr<RouterServer>> server = RouterServer::Start(options, [&] { ready_line.SetReady(); });
  if (!server.ok()) {
    std::cerr << "millrace-router: " << server.status().message() << std::endl;
    return 2;
  }
  Address address = *ParseAddress(options.listen);
  address.port = (*server)->port();
  ready_line.SetAddress(address.ToString());
  const int signal = signals.Wait();
  Log(LogLevel::kInfo, "shutting_down", {{"signal", signal}, {"drain_ms", options.drain_ms}});
  (*server)->Shutdown(std::chrono::milliseconds(options.drain_ms));
  return 0;
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "serves a language model to clients from a set of workers\n  millrace-router --model=FOLDER "
      "--workers=HOST:PORT,…");
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) { return absl::EndsWith(file, "router/main.cc"); };
  absl::SetFlagsUsageConfig(usage);
  const std::vector<char*> rest = absl::ParseCommandLine(argc, argv);
  if (rest.size() > 1) {
    std::fprintf(stderr, "millrace-router: unknown argument \"%s\"; all arguments are flags\n", rest[1]);
    return 2;
  }
  return millrace::Run();
}
