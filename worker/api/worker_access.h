// Who may command this worker: with TLS, only who shows a certificate with a router's name. A call is refused before
// its messages are read. Any thread; lives as long as the server.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/security/server_credentials.h"
#include "service/metric_page.h"
#include "service/refusals.h"
#include "service/tls_identity.h"

namespace millrace {

class WorkerAccess {
 public:
  // Without files: plaintext, and whoever comes. INVALID_ARGUMENT naming what is wrong with a file.
  static absl::StatusOr<std::unique_ptr<WorkerAccess>> Open(const TlsFiles& files,
                                                            std::vector<std::string> router_identities);

  // What it holds refers to this.
  std::shared_ptr<grpc::ServerCredentials> ForRouters();
  void Fill(MetricPage* page) const;

 private:
  class Guard;
  explicit WorkerAccess(std::vector<std::string> router_identities)
      : router_identities_(std::move(router_identities)) {}

  const std::vector<std::string> router_identities_;
  std::unique_ptr<TlsIdentity> serving_;  // null: plaintext
  Refusals refusals_;
};

}  // namespace millrace
