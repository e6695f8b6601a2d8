// The router's page of metrics: the requests' figures, and what the fleet and the scheduler say when asked. Called by
// the threads of the metrics server; lives as long as that. Series: about 520, and 11 for each of at most 64 workers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "router/api/call_registry.h"
#include "router/api/request_metrics.h"
#include "router/api/router_access.h"
#include "router/api/router_options.h"
#include "router/fleet/fleet.h"
#include "service/metric_page.h"
#include "service/readiness.h"
#include "service/span_exporter.h"

namespace millrace {

// Workers past the 64th have no series of their own.
void AddWorkerMetrics(const std::vector<v1::WorkerStatus>& workers, const std::string& model_name, MetricPage* page);

class RouterMetrics {
 public:
  RouterMetrics(const RouterOptions& options, std::string model_name, const RouterAccess* access, const Fleet* fleet,
                const CallRegistry* registry, const RequestMetrics* requests, const Readiness* readiness,
                const SpanExporter* spans);

  void Fill(MetricPage* page) const;

 private:
  const RouterOptions options_;
  const std::string model_name_;
  const RouterAccess* const access_;
  const Fleet* const fleet_;
  const CallRegistry* const registry_;
  const RequestMetrics* const requests_;
  const Readiness* const readiness_;
  const SpanExporter* const spans_;  // null: none are exported
};

}  // namespace millrace
