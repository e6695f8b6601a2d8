// The whole router in one object: model text, fleet, services, and the gRPC server in front. Started once; stopped by
// Shutdown or the destructor. main and the tests make one each.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "router/api/admin_service.h"
#include "router/api/inference_service.h"
#include "router/api/request_metrics.h"
#include "router/api/router_access.h"
#include "router/api/router_metrics.h"
#include "router/api/router_options.h"
#include "service/health_service.h"
#include "service/metrics_server.h"
#include "service/probe_server.h"
#include "service/readiness.h"
#include "service/span_exporter.h"

namespace millrace {

class RouterServer {
 public:
  // Serves when this returns. `on_ready` is called once, from another thread, when the first worker is ready.
  // Until then readiness, the health of millrace.v1.InferenceService, is NOT_SERVING.
  static absl::StatusOr<std::unique_ptr<RouterServer>> Start(const RouterOptions& options,
                                                             std::function<void()> on_ready);
  ~RouterServer();

  int port() const { return port_; }
  // HOST:PORT of /metrics; empty: none.
  std::string metrics_address() const { return metrics_server_ == nullptr ? "" : metrics_server_->address(); }
  // HOST:PORT of health in plaintext; empty: none.
  std::string probe_address() const { return probe_ == nullptr ? "" : probe_->address(); }
  // Takes no more calls, lets open ones go on for `grace`, then cancels them; then leaves the workers.
  void Shutdown(std::chrono::milliseconds grace);

 private:
  RouterServer(const RouterOptions& options, std::unique_ptr<ServedModel> model, std::unique_ptr<RouterAccess> access,
               std::function<void()> on_ready);
  absl::Status Listen(const RouterOptions& options);
  Readiness::Sample SampleReadiness() const;

  const std::unique_ptr<const ServedModel> model_;
  const std::unique_ptr<RouterAccess> access_;
  const std::unique_ptr<SpanExporter> spans_;  // null: none are exported
  RequestMetrics requests_;
  CallRegistry registry_;
  HealthService health_;
  std::atomic<bool> any_ready_{false};
  Fleet fleet_;
  InferenceService inference_;
  AdminService admin_;
  Readiness readiness_;
  const RouterMetrics metrics_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::unique_ptr<ProbeServer> probe_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace millrace
