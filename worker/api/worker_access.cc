#include "worker/api/worker_access.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace millrace {

class WorkerAccess::Guard final : public grpc::AuthMetadataProcessor {
 public:
  explicit Guard(WorkerAccess* access) : access_(access) {}
  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* peer, OutputMetadata*,
                       OutputMetadata*) override {
    const auto path = metadata.find(":path");
    const absl::string_view method =
        path == metadata.end() ? "" : absl::string_view(path->second.data(), path->second.size());
    if (absl::StartsWith(method, "/grpc.health.v1.Health/")) return grpc::Status::OK;
    const std::vector<std::string> names = PeerNames(*peer);
    const auto is_router = [&](const std::string& name) {
      return std::ranges::count(access_->router_identities_, name) > 0;
    };
    if (std::ranges::any_of(names, is_router)) return grpc::Status::OK;
    access_->refusals_.Add(Refusals::kWrongRole, method, absl::StrJoin(names, ","));
    return {grpc::StatusCode::PERMISSION_DENIED, "this needs a router's certificate"};
  }

 private:
  WorkerAccess* const access_;
};

absl::StatusOr<std::unique_ptr<WorkerAccess>> WorkerAccess::Open(const TlsFiles& files,
                                                                 std::vector<std::string> router_identities) {
  std::unique_ptr<WorkerAccess> access(new WorkerAccess(std::move(router_identities)));
  if (files.empty()) return access;
  auto identity = TlsIdentity::Open("serving", files);
  if (!identity.ok()) return absl::InvalidArgumentError(absl::StrCat("--tls_…: ", identity.status().message()));
  access->serving_ = *std::move(identity);
  return access;
}

std::shared_ptr<grpc::ServerCredentials> WorkerAccess::ForRouters() {
  if (serving_ == nullptr) return grpc::InsecureServerCredentials();
  auto credentials = serving_->ForServer();
  credentials->SetAuthMetadataProcessor(std::make_shared<Guard>(this));
  return credentials;
}

void WorkerAccess::Fill(MetricPage* page) const {
  refusals_.Fill(page);
  if (serving_ != nullptr) serving_->Fill(page);
}

}  // namespace millrace
