#include "router/api/router_server.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/resource_quota.h"
#include "router/api/generate_call.h"
#include "router/api/validate.h"
#include "router/fleet/clock.h"
#include "router/fleet/liveness.h"
#include "service/log.h"
#include "service/server_limits.h"

namespace millrace {
namespace {

constexpr int kMaxStreamsPerConnection = 10'000;
constexpr int kKeepaliveMs = 30'000;

FleetOptions ToFleetOptions(const RouterOptions& options, const ServedModel& model, std::function<void()> on_ready,
                            const RouterAccess& access, std::function<void()> on_taken_over) {
  FleetOptions fleet;
  fleet.router_id = options.router_id;
  fleet.epoch = options.epoch;
  fleet.addresses = options.addresses();
  fleet.services = options.services();
  fleet.credentials = access.ForWorkers();
  fleet.tokenizer_vocab = static_cast<uint32_t>(model.tokenizer().vocab_size());
  fleet.scheduler = options.scheduler;
  fleet.scheduler.speculation = options.speculation == "auto";
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
  absl::StatusOr<std::unique_ptr<RouterAccess>> access = RouterAccess::Open(options);
  if (!access.ok()) return access.status();
  RouterOptions known = options;
  if (known.epoch == 0) known.epoch = UnixMicros();
  std::unique_ptr<RouterServer> server(
      new RouterServer(known, *std::move(model), *std::move(access), std::move(on_ready)));
  if (absl::Status status = server->Listen(known); !status.ok()) return status;
  server->fleet_.Start();
  return server;
}

RouterServer::RouterServer(const RouterOptions& options, std::unique_ptr<ServedModel> model,
                           std::unique_ptr<RouterAccess> access, std::function<void()> on_ready)
    : model_(std::move(model)),
      access_(std::move(access)),
      spans_(SpanExporter::Start(options.otlp_endpoint, {"millrace-router", options.router_id, MILLRACE_VERSION})),
      registry_(static_cast<size_t>(options.max_calls)),
      fleet_(ToFleetOptions(
          options, *model_,
          [this, on_ready = std::move(on_ready)] {
            any_ready_ = true;
            readiness_.Look();
            if (on_ready) on_ready();
          },
          *access_, [this] { readiness_.Drain(); })),
      inference_(model_.get(), access_.get(), &fleet_, &registry_, &requests_, spans_.get()),
      admin_(options.router_id, options.epoch, &fleet_, &registry_),
      readiness_(&health_, v1::InferenceService::service_full_name(), [this] { return SampleReadiness(); }),
      metrics_(options, model_->name(), access_.get(), &fleet_, &registry_, &requests_, &readiness_, spans_.get()) {}

RouterServer::~RouterServer() { Shutdown(std::chrono::milliseconds(0)); }

absl::Status RouterServer::Listen(const RouterOptions& options) {
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options.listen, access_->ForClients(), &port_);
  builder.RegisterService(&inference_);
  builder.RegisterService(&admin_);
  builder.RegisterService(&health_);
  SetServerLimits({.max_message_bytes = static_cast<int>(kMaxRequestBytes),
                   .max_streams = kMaxStreamsPerConnection,
                   .keepalive_ms = kKeepaliveMs},
                  &builder);
  builder.SetResourceQuota(grpc::ResourceQuota("router").Resize(static_cast<size_t>(options.max_request_bytes)));
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port_ == 0) {
    return absl::UnavailableError(absl::StrCat("--listen is ", options.listen, ", which cannot be bound"));
  }
  if (!options.metrics_listen.empty()) {
    auto metrics = MetricsServer::Start(options.metrics_listen, [this](MetricPage* page) { metrics_.Fill(page); });
    if (!metrics.ok()) return metrics.status();
    metrics_server_ = *std::move(metrics);
  }
  if (!options.probe_listen.empty()) {
    auto probe = ProbeServer::Start(options.probe_listen, &health_);
    if (!probe.ok()) return probe.status();
    probe_ = *std::move(probe);
  }
  Log(LogLevel::kInfo, "serving",
      {{"port", port_},
       {"metrics", metrics_address()},
       {"probes", probe_address()},
       {"model", model_->name()},
       {"router", options.router_id},
       {"epoch", options.epoch}});
  return absl::OkStatus();
}

Readiness::Sample RouterServer::SampleReadiness() const {
  const SchedulerCounts counts = fleet_.counts();
  Readiness::Sample sample;
  sample.ready = any_ready_;
  sample.progress.pending = counts.running + counts.queued > counts.paused;
  for (const v1::WorkerStatus& worker : fleet_.workers()) {
    sample.progress.steps += worker.steps();
    sample.progress.usual_step_us = std::max<int64_t>(sample.progress.usual_step_us, worker.last_step_us());
  }
  // A worker that only prefills may do so in one step; as patient with it as Liveness is.
  const double prefill_us = std::min(fleet_.longest_prefill() * 1e6, 1.0 * Liveness::kMostProgressLimit);
  sample.progress.longest_step_us = static_cast<int64_t>(prefill_us * Liveness::kPrefillsOfPatience / 2);
  return sample;
}

void RouterServer::Shutdown(std::chrono::milliseconds grace) {
  if (server_ == nullptr) return;
  readiness_.Drain();
  health_.Shutdown();
  server_->Shutdown(std::chrono::system_clock::now() + grace);
  fleet_.Stop();
  server_.reset();
}

}  // namespace millrace
