// millrace-worker: serves one model to one router. Exit codes: 0 at most --drain_ms and 3 s after SIGTERM or SIGINT, 1
// if model or certificate cannot be loaded or the address not be taken, 2 if an option is wrong, 3 if the GPU failed.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/synchronization/mutex.h"
#include "service/grpc_log.h"
#include "service/log.h"
#include "service/signals.h"
#include "worker/api/worker_options.h"
#include "worker/api/worker_server.h"

ABSL_FLAG(std::string, model, "", "folder with config.json and safetensors; required");
ABSL_FLAG(std::string, model_name, "", "name that clients use; default: the folder's name");
ABSL_FLAG(std::string, listen, millrace::WorkerOptions().listen, "HOST:PORT; port 0 takes a free one");
ABSL_FLAG(std::string, metrics_listen, millrace::WorkerOptions().metrics_listen,
          "HOST:PORT of /metrics; port 0: any free one; empty: none");
ABSL_FLAG(std::string, log_level, "info", "least that is logged: debug, info, warning or error");
ABSL_FLAG(std::string, probe_listen, "",
          "HOST:PORT of health in plaintext, and of nothing else, for probes that have no certificate; empty: none");
ABSL_FLAG(std::string, tls_certificate, "", "PEM file: what the worker shows to routers; empty: plaintext");
ABSL_FLAG(std::string, tls_key, "", "PEM file: its private key");
ABSL_FLAG(std::string, tls_ca, "", "PEM file: who must have signed routers' certificates");
ABSL_FLAG(std::vector<std::string>, router_identity, millrace::WorkerOptions().router_identity,
          "DNS or URI names of which a router's certificate has one");
ABSL_FLAG(
    bool, unencrypted, false,
    "allow plaintext on an address other than loopback: whoever reaches it can read prompts and command the worker");
ABSL_FLAG(bool, unencrypted_metrics, false, "allow /metrics on such an address, in plaintext and for anybody");
ABSL_FLAG(std::string, otlp_endpoint, "",
          "HOST:PORT of a collector of spans, OTLP over gRPC in plaintext; empty: none");
ABSL_FLAG(
    bool, unencrypted_spans, false,
    "allow a collector beyond this machine: whoever is on the way reads what requests are traced, not their text");
ABSL_FLAG(std::string, worker_id, "", "name of this worker, at most 128 bytes; default: drawn at start-up");
ABSL_FLAG(std::string, device, millrace::WorkerOptions().device, "cpu, cuda or cuda:N");
ABSL_FLAG(int, threads, millrace::WorkerOptions().threads, "compute threads on the CPU; 0: one per core");
ABSL_FLAG(
    std::string, kv_memory, millrace::WorkerOptions().kv_memory,
    "memory of the KV pool, e.g. 512MiB or 2GiB; empty: 1GiB on the CPU, on a GPU what --gpu_memory_fraction leaves");
ABSL_FLAG(double, gpu_memory_fraction, millrace::WorkerOptions().gpu_memory_fraction,
          "of the GPU's free memory, for weights, activations and KV pool together");
ABSL_FLAG(int, max_slots, millrace::WorkerOptions().max_slots, "sequences at once");
ABSL_FLAG(int, max_rows, millrace::WorkerOptions().max_rows,
          "tokens of one step; at least max_slots; 0: 512 on the CPU, 8192 on a GPU");
ABSL_FLAG(std::string, draft_model, "",
          "folder of a small model of the same vocabulary that drafts tokens; its cache takes part of --kv_memory");
ABSL_FLAG(int, draft_layers, millrace::WorkerOptions().draft_layers,
          "instead, draft tokens with the model's own first layers, so many; 0: do not");
ABSL_FLAG(double, step_target_ms, millrace::WorkerOptions().step_target_ms,
          "decoding steps take prefill as long as they are predicted to stay below");
ABSL_FLAG(int64_t, drain_ms, millrace::WorkerOptions().drain_ms,
          "what sequences may take to end after SIGTERM or SIGINT; then the router moves them");

namespace {

millrace::WorkerOptions OptionsFromFlags() {
  millrace::WorkerOptions options;
  options.model = absl::GetFlag(FLAGS_model);
  options.model_name = absl::GetFlag(FLAGS_model_name);
  options.listen = absl::GetFlag(FLAGS_listen);
  options.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  options.probe_listen = absl::GetFlag(FLAGS_probe_listen);
  options.tls = {absl::GetFlag(FLAGS_tls_certificate), absl::GetFlag(FLAGS_tls_key), absl::GetFlag(FLAGS_tls_ca)};
  options.router_identity = absl::GetFlag(FLAGS_router_identity);
  options.unencrypted = absl::GetFlag(FLAGS_unencrypted);
  options.unencrypted_metrics = absl::GetFlag(FLAGS_unencrypted_metrics);
  options.otlp_endpoint = absl::GetFlag(FLAGS_otlp_endpoint);
  options.unencrypted_spans = absl::GetFlag(FLAGS_unencrypted_spans);
  options.worker_id = absl::GetFlag(FLAGS_worker_id);
  options.device = absl::GetFlag(FLAGS_device);
  options.gpu_memory_fraction = absl::GetFlag(FLAGS_gpu_memory_fraction);
  options.threads = absl::GetFlag(FLAGS_threads);
  options.kv_memory = absl::GetFlag(FLAGS_kv_memory);
  options.max_slots = absl::GetFlag(FLAGS_max_slots);
  options.max_rows = absl::GetFlag(FLAGS_max_rows);
  options.draft_model = absl::GetFlag(FLAGS_draft_model);
  options.draft_layers = absl::GetFlag(FLAGS_draft_layers);
  options.step_target_ms = absl::GetFlag(FLAGS_step_target_ms);
  options.drain_ms = absl::GetFlag(FLAGS_drain_ms);
  return options;
}

int Fail(const std::string& message, int code) {
  std::fprintf(stderr, "millrace-worker: %s\n", message.c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  millrace::ShutdownSignals signals;
  // A debugging aid, on in builds like Debian's: every mutex would take one lock that all share.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  absl::SetProgramUsageMessage("serves one model to one router\n  millrace-worker --model=FOLDER [--listen=HOST:PORT]");
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  if (arguments.size() > 1) return Fail(std::string("argument \"") + arguments[1] + "\"; the limit is flags alone", 2);
  const auto level = millrace::ParseLogLevel(absl::GetFlag(FLAGS_log_level));
  if (!level.ok()) return Fail("--log_level: " + std::string(level.status().message()), 2);
  millrace::SetLogLevel(*level);
  millrace::TakeGrpcLog();
  const millrace::WorkerOptions options = OptionsFromFlags();
  if (const absl::Status status = options.Validate(); !status.ok()) return Fail(std::string(status.message()), 2);

  auto worker = millrace::WorkerServer::Start(options);
  if (!worker.ok()) return Fail(worker.status().ToString(), 1);
  std::printf("ready %s\n", (*worker)->address().c_str());
  std::fflush(stdout);
  signals.Wait();
  (*worker)->Drain(absl::Milliseconds(options.drain_ms));
  return 0;
}
