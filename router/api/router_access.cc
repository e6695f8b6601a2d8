#include "router/api/router_access.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace millrace {
namespace {

constexpr absl::string_view kHealth = "/grpc.health.v1.Health/";
constexpr absl::string_view kAdmin = "/millrace.v1.AdminService/";

absl::Status OpenTls(const char* flags, const TlsFiles& files, const char* name, std::unique_ptr<TlsIdentity>* out) {
  if (files.empty()) return absl::OkStatus();
  auto identity = TlsIdentity::Open(name, files);
  if (!identity.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--", flags, "_…: ", identity.status().message()));
  }
  *out = *std::move(identity);
  return absl::OkStatus();
}

absl::Status OpenTokens(const char* flag, const std::string& path, std::unique_ptr<Tokens>* out) {
  if (path.empty()) return absl::OkStatus();
  auto tokens = Tokens::Open(path);
  if (!tokens.ok()) return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", tokens.status().message()));
  *out = *std::move(tokens);
  return absl::OkStatus();
}

// Who it is, as far as a certificate says; else what it calls itself.
std::string Describe(const grpc::AuthMetadataProcessor::InputMetadata& metadata, const grpc::AuthContext& peer) {
  const std::vector<std::string> names = PeerNames(peer);
  if (!names.empty()) return absl::StrJoin(names, ",");
  const auto agent = metadata.find("user-agent");
  return agent == metadata.end() ? "" : std::string(agent->second.data(), agent->second.size());
}

}  // namespace

class RouterAccess::Guard final : public grpc::AuthMetadataProcessor {
 public:
  explicit Guard(RouterAccess* access) : access_(access) {}
  bool IsBlocking() const override { return false; }
  // The token stays among the metadata: it says whose the request is.
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* peer, OutputMetadata*,
                       OutputMetadata*) override {
    return access_->Judge(metadata, *peer);
  }

 private:
  RouterAccess* const access_;
};

absl::StatusOr<std::unique_ptr<RouterAccess>> RouterAccess::Open(const RouterOptions& options) {
  std::unique_ptr<RouterAccess> access(new RouterAccess(options));
  absl::Status status = OpenTls("tls", options.tls, "serving", &access->serving_);
  if (status.ok()) status = OpenTls("workers_tls", options.workers_tls, "workers", &access->workers_);
  if (status.ok()) status = OpenTokens("tokens", options.tokens, &access->tokens_);
  if (status.ok()) status = OpenTokens("admin_tokens", options.admin_tokens, &access->admin_tokens_);
  if (!status.ok()) return status;
  return access;
}

// A token in plaintext is whoever's who listens: where there are tokens but no TLS, gRPC takes peers of this machine
// alone.
std::shared_ptr<grpc::ServerCredentials> RouterAccess::ForClients() {
  const bool guarded = tokens_ != nullptr || admin_tokens_ != nullptr;
  if (serving_ == nullptr && !guarded) return grpc::InsecureServerCredentials();
  auto credentials =
      serving_ != nullptr ? serving_->ForServer() : grpc::experimental::LocalServerCredentials(LOCAL_TCP);
  if (guarded) credentials->SetAuthMetadataProcessor(std::make_shared<Guard>(this));
  return credentials;
}

std::shared_ptr<grpc::ChannelCredentials> RouterAccess::ForWorkers() const {
  return workers_ == nullptr ? grpc::InsecureChannelCredentials() : workers_->ForChannel(worker_identities_);
}

grpc::Status RouterAccess::Judge(const Metadata& metadata, const grpc::AuthContext& peer) {
  const auto path = metadata.find(":path");
  const absl::string_view method =
      path == metadata.end() ? "" : absl::string_view(path->second.data(), path->second.size());
  if (absl::StartsWith(method, kHealth)) return grpc::Status::OK;
  const bool admin = absl::StartsWith(method, kAdmin);
  if (!admin && tokens_ == nullptr) return grpc::Status::OK;
  const auto refuse = [&](Refusals::Reason reason, grpc::StatusCode code, const char* message) {
    refusals_.Add(reason, method, Describe(metadata, peer));
    return grpc::Status(code, message);
  };
  const std::optional<absl::string_view> token = BearerToken(metadata);
  if (!token.has_value()) {
    return refuse(Refusals::kNoToken, grpc::StatusCode::UNAUTHENTICATED, "a bearer token is required");
  }
  if (admin_tokens_ != nullptr && admin_tokens_->Find(*token).has_value()) return grpc::Status::OK;
  if (tokens_ == nullptr || !tokens_->Find(*token).has_value()) {
    return refuse(Refusals::kWrongToken, grpc::StatusCode::UNAUTHENTICATED, "the bearer token is not valid");
  }
  if (!admin) return grpc::Status::OK;
  return refuse(Refusals::kNotAdmin, grpc::StatusCode::PERMISSION_DENIED, "this needs an operator's token");
}

absl::StatusOr<std::string> RouterAccess::TenantOf(const grpc::CallbackServerContext& context) const {
  if (tokens_ == nullptr) return "";
  const std::optional<absl::string_view> token = BearerToken(context.client_metadata());
  std::optional<std::string> tenant = token.has_value() ? tokens_->Find(*token) : std::nullopt;
  if (!tenant.has_value() && token.has_value() && admin_tokens_ != nullptr) tenant = admin_tokens_->Find(*token);
  if (!tenant.has_value()) return absl::UnauthenticatedError("the bearer token is not valid");
  return *std::move(tenant);
}

void RouterAccess::Fill(MetricPage* page) const {
  refusals_.Fill(page);
  if (serving_ != nullptr) serving_->Fill(page);
  if (workers_ != nullptr) workers_->Fill(page);
}

}  // namespace millrace
