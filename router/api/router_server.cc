#include "router/api/router_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "router/api/generate_call.h"
#include "router/api/validate.h"
#include "router/fleet/clock.h"
#include "service/log.h"

namespace millrace {
namespace {

constexpr int kMaxStreamsPerConnection = 10'000;
constexpr int kMaxMetadataBytes = 16 << 10;
constexpr int kLeastPingIntervalMs = 9'000;  // clients ping every 10 s
constexpr int kKeepaliveMs = 30'000;
constexpr int kKeepaliveTimeoutMs = 10'000;

FleetOptions ToFleetOptions(const RouterOptions& options, const ServedModel& model, std::function<void()> on_ready,
                            std::function<void()> on_taken_over) {
  FleetOptions fleet;
  fleet.router_id = options.router_id;
  fleet.epoch = options.epoch;
  fleet.addresses = options.addresses();
  fleet.services = options.services();
  fleet.tokenizer_vocab = static_cast<uint32_t>(model.tokenizer().vocab_size());
  fleet.scheduler = options.scheduler;
  fleet.scheduler.hash_key[0] = RandomBits();
  fleet.scheduler.hash_key[1] = RandomBits();
  fleet.on_first_ready = std::move(on_ready);
  fleet.on_taken_over = std::move(on_taken_over);
  return fleet;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RouterServer>> RouterServer::Start(const RouterOptions& options,
                                                                  std::function<void()> on_ready) {
  if (absl::Status status = options.Validate(); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<ServedModel>> model = ServedModel::Load(options.model, options.model_name);
  if (!model.ok()) {
    return absl::Status(model.status().code(),
                        absl::StrCat("--model is ", options.model, ": ", model.status().message()));
  }
  RouterOptions known = options;
  if (known.epoch == 0) known.epoch = UnixMicros();
  std::unique_ptr<RouterServer> server(new RouterServer(known, *std::move(model), std::move(on_ready)));
  if (absl::Status status = server->Listen(known); !status.ok()) return status;
  server->fleet_.Start();
  return server;
}

RouterServer::RouterServer(const RouterOptions& options, std::unique_ptr<ServedModel> model,
                           std::function<void()> on_ready)
    : model_(std::move(model)),
      registry_(static_cast<size_t>(options.max_calls)),
      fleet_(ToFleetOptions(
          options, *model_,
          [this, on_ready = std::move(on_ready)] {
            server_->GetHealthCheckService()->SetServingStatus(true);
            if (on_ready) on_ready();
          },
          [this] { server_->GetHealthCheckService()->SetServingStatus(false); })),
      inference_(model_.get(), &fleet_, &registry_),
      admin_(options.router_id, options.epoch, &fleet_, &registry_) {}

RouterServer::~RouterServer() { Shutdown(std::chrono::milliseconds(0)); }

absl::Status RouterServer::Listen(const RouterOptions& options) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(&inference_);
  builder.RegisterService(&admin_);
  builder.SetMaxReceiveMessageSize(static_cast<int>(kMaxRequestBytes));
  builder.SetResourceQuota(grpc::ResourceQuota("router").Resize(static_cast<size_t>(options.max_request_bytes)));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kLeastPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port_ == 0) {
    return absl::UnavailableError(absl::StrCat("--listen is ", options.listen, ", which cannot be bound"));
  }
  server_->GetHealthCheckService()->SetServingStatus(false);
  Log(LogLevel::kInfo, "serving",
      {{"port", port_}, {"model", model_->name()}, {"router", options.router_id}, {"epoch", options.epoch}});
  return absl::OkStatus();
}

void RouterServer::Shutdown(std::chrono::milliseconds grace) {
  if (server_ == nullptr) return;
  server_->GetHealthCheckService()->SetServingStatus(false);
  server_->Shutdown(std::chrono::system_clock::now() + grace);
  fleet_.Stop();
  server_.reset();
}

}  // namespace millrace
