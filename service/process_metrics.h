// What every process exports under the names that Prometheus' own libraries use. Stateless; any thread.
#pragma once

#include "service/metric_page.h"

namespace millrace {

void AddProcessMetrics(MetricPage* page);

}  // namespace millrace
