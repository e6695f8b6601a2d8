#include "service/metrics_server.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "prometheus/collectable.h"
#include "prometheus/exposer.h"
#include "service/address.h"
#include "service/process_metrics.h"

namespace millrace {
namespace {

class Page final : public prometheus::Collectable {
 public:
  explicit Page(MetricsServer::Fill fill) : fill_(std::move(fill)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    MetricPage page;
    fill_(&page);
    AddProcessMetrics(&page);
    return page.Take();
  }

 private:
  const MetricsServer::Fill fill_;
};

// Connects and goes; whether it came through does not matter.
void Touch(const Address& address) {
  addrinfo hints = {};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found) != 0) return;
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd >= 0) {
    (void)connect(fd, found->ai_addr, found->ai_addrlen);
    close(fd);
  }
  freeaddrinfo(found);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& listen, Fill fill) {
  absl::StatusOr<Address> address = ParseAddress(listen);
  if (!address.ok()) return address.status();
  if (address->host == "localhost") address->host = "127.0.0.1";  // the library takes numbers
  std::unique_ptr<MetricsServer> server(new MetricsServer());
  server->page_ = std::make_shared<Page>(std::move(fill));
  // Two scrapers at once; one that sends or reads nothing for 10 s gives its thread back.
  const std::vector<std::string> options = {
      "listening_ports", address->ToString(), "num_threads", "2", "request_timeout_ms", "10000"};
  try {
    server->server_ = std::make_unique<prometheus::Exposer>(options);
    server->server_->RegisterCollectable(server->page_);
    const std::vector<int> ports = server->server_->GetListeningPorts();
    if (!ports.empty()) address->port = ports.front();
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(listen, " cannot be bound for metrics: ", error.what()));
  }
  server->address_ = address->ToString();
  return server;
}

// The library looks whether it is to stop when a connection comes, or every 2 s, which a shutdown should not take.
MetricsServer::~MetricsServer() {
  if (server_ == nullptr) return;
  absl::Notification stopped;
  std::thread stopper([&] {
    server_.reset();
    stopped.Notify();
  });
  while (!stopped.WaitForNotificationWithTimeout(absl::Milliseconds(10))) Touch(*ParseAddress(address_));
  stopper.join();
}

}  // namespace millrace
