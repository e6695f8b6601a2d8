// Health for those who have no certificate: `grpc.health.v1` Check, and nothing else, in plaintext on a port of its
// own, with threads of its own, so that an answer waits for no other call. Lives from start-up to shutdown; the
// HealthService outlives it.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/server.h"
#include "service/health_service.h"

namespace millrace {

class ProbeServer {
 public:
  // `listen`: HOST:PORT; port 0: any free one. UNAVAILABLE if it cannot be taken.
  static absl::StatusOr<std::unique_ptr<ProbeServer>> Start(const std::string& listen, const HealthService* health);
  ~ProbeServer();

  const std::string& address() const { return address_; }  // with the port that was taken

 private:
  class Service;
  explicit ProbeServer(const HealthService* health);

  const std::unique_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace millrace
