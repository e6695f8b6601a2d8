#include "service/probe_server.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server_builder.h"
#include "service/address.h"
#include "service/server_limits.h"

namespace millrace {
namespace {

constexpr int kMaxThreads = 4;
constexpr size_t kMaxBytes = 4 << 20;  // of everything that peers have under way here

}  // namespace

class ProbeServer::Service final : public grpc::health::v1::Health::Service {
 public:
  explicit Service(const HealthService* health) : health_(health) {}

  grpc::Status Check(grpc::ServerContext*, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override {
    return health_->Answer(request->service(), response);
  }

 private:
  const HealthService* const health_;
};

ProbeServer::ProbeServer(const HealthService* health) : service_(std::make_unique<Service>(health)) {}

absl::StatusOr<std::unique_ptr<ProbeServer>> ProbeServer::Start(const std::string& listen,
                                                                const HealthService* health) {
  absl::StatusOr<Address> address = ParseAddress(listen);
  if (!address.ok()) return address.status();
  std::unique_ptr<ProbeServer> probe(new ProbeServer(health));
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(probe->service_.get());
  SetServerLimits({.max_message_bytes = 4096, .max_streams = 16, .keepalive_ms = 30'000}, &builder);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 1);
  builder.SetResourceQuota(grpc::ResourceQuota("probe").Resize(kMaxBytes).SetMaxThreads(kMaxThreads));
  probe->server_ = builder.BuildAndStart();
  if (probe->server_ == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat("--probe_listen is ", listen, ", which cannot be bound"));
  }
  address->port = port;
  probe->address_ = address->ToString();
  return probe;
}

ProbeServer::~ProbeServer() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
}

}  // namespace millrace
