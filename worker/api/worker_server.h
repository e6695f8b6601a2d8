// A whole worker in this process: model, engine, service and listening socket. Built at start-up, in order; destroyed
// at shutdown, in reverse. The main thread's own.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/server.h"
#include "millrace/worker/v1/worker.pb.h"
#include "service/health_service.h"
#include "service/metrics_server.h"
#include "service/probe_server.h"
#include "service/readiness.h"
#include "service/span_exporter.h"
#include "worker/api/execute_service.h"
#include "worker/api/worker_access.h"
#include "worker/api/worker_metrics.h"
#include "worker/api/worker_options.h"
#include "worker/engine/engine.h"

namespace millrace {

// HOST:PORT each; port 0: any free one.
struct WorkerAddresses {
  std::string listen;
  std::string metrics_listen;  // empty: without /metrics
  std::string probe_listen;    // empty: without health in plaintext
  std::string otlp_endpoint;   // of a collector of spans; empty: none
};

class WorkerServer {
 public:
  // What a router is never left without a message for; it counts a worker as dead after six of these.
  static constexpr absl::Duration kMaxSilence = absl::Milliseconds(250);

  // Loads the model, measures what a step costs and listens. REQUIRES valid options.
  static absl::StatusOr<std::unique_ptr<WorkerServer>> Start(const WorkerOptions& options);
  // Serves an engine that exists: what Start does after loading.
  static absl::StatusOr<std::unique_ptr<WorkerServer>> Serve(std::unique_ptr<Engine> engine, worker::v1::Ready ready,
                                                             std::unique_ptr<WorkerAccess> access,
                                                             const WorkerAddresses& addresses,
                                                             absl::Duration silence = kMaxSilence);
  // Ends streams with UNAVAILABLE.
  ~WorkerServer();

  // Takes no new router, tells the one it has, and returns when that has emptied every slot, by letting sequences end
  // or by moving them: at most `budget` and 2 s later.
  void Drain(absl::Duration budget);

  const std::string& address() const { return address_; }  // HOST:PORT, with the port that was taken
  // HOST:PORT of /metrics; empty: none.
  std::string metrics_address() const { return metrics_server_ == nullptr ? "" : metrics_server_->address(); }
  // HOST:PORT of health in plaintext; empty: none.
  std::string probe_address() const { return probe_ == nullptr ? "" : probe_->address(); }
  const Engine& engine() const { return *engine_; }

 private:
  WorkerServer(std::unique_ptr<Engine> engine, worker::v1::Ready ready, std::unique_ptr<WorkerAccess> access,
               const WorkerAddresses& addresses, absl::Duration silence);

  absl::Status Listen(const WorkerAddresses& addresses);

  const std::unique_ptr<WorkerAccess> access_;
  const worker::v1::Ready ready_;
  const std::unique_ptr<SpanExporter> spans_;  // null: none are exported
  WorkerMetrics metrics_;                      // the engine's thread writes to both
  std::unique_ptr<Engine> engine_;
  HealthService health_;
  ExecuteService service_;
  Readiness readiness_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::unique_ptr<ProbeServer> probe_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace millrace
