// Who may talk to this router and whom it talks to: certificates of the client port and of the workers' side, clients'
// and operators' tokens. A call is refused before its message is read. Any thread; lives as long as the server.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_context.h"
#include "router/api/router_options.h"
#include "service/metric_page.h"
#include "service/refusals.h"
#include "service/tls_identity.h"
#include "service/tokens.h"

namespace millrace {

class RouterAccess {
 public:
  // INVALID_ARGUMENT naming the flag and what is wrong with its file. REQUIRES valid options.
  static absl::StatusOr<std::unique_ptr<RouterAccess>> Open(const RouterOptions& options);

  // Of the client port. What it holds refers to this.
  std::shared_ptr<grpc::ServerCredentials> ForClients();
  std::shared_ptr<grpc::ChannelCredentials> ForWorkers() const;

  // UNAUTHENTICATED: the call has no token (any more). The tenant that its token speaks for; empty: the caller's
  // choice.
  absl::StatusOr<std::string> TenantOf(const grpc::CallbackServerContext& context) const;
  void Fill(MetricPage* page) const;

 private:
  using Metadata = grpc::AuthMetadataProcessor::InputMetadata;
  class Guard;

  explicit RouterAccess(const RouterOptions& options) : worker_identities_(options.worker_identity) {}
  grpc::Status Judge(const Metadata& metadata, const grpc::AuthContext& peer);

  const std::vector<std::string> worker_identities_;
  std::unique_ptr<TlsIdentity> serving_;  // null: plaintext
  std::unique_ptr<TlsIdentity> workers_;  // likewise
  std::unique_ptr<Tokens> tokens_;        // null: clients need none
  std::unique_ptr<Tokens> admin_tokens_;  // null: operators need none, unless clients do; then there is no operator
  Refusals refusals_;
};

}  // namespace millrace
