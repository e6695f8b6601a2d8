// `/metrics` over HTTP/1.1, on threads of its own. Lives from start-up to shutdown; whatever `fill` reads outlives it.
// The one wrapper around prometheus-cpp's server, which throws.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "service/metric_page.h"

namespace prometheus {
class Collectable;
class Exposer;
}  // namespace prometheus

namespace millrace {

class MetricsServer {
 public:
  using Fill = std::function<void(MetricPage*)>;  // called for each scrape, by several threads at once

  // `listen`: HOST:PORT; port 0: any free one. UNAVAILABLE if it cannot be taken.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& listen, Fill fill);
  ~MetricsServer();

  const std::string& address() const { return address_; }  // with the port that was taken

 private:
  MetricsServer() = default;

  std::string address_;
  std::shared_ptr<prometheus::Collectable> page_;  // the server's too, while it collects
  std::unique_ptr<prometheus::Exposer> server_;
};

}  // namespace millrace
