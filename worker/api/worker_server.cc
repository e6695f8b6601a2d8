#include "worker/api/worker_server.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/server_builder.h"
#include "service/address.h"
#include "service/log.h"
#include "service/server_limits.h"
#include "worker/api/fingerprint.h"
#include "worker/engine/step_cost.h"
#include "worker/model/model_runner.h"

namespace millrace {
namespace {

constexpr int kMaxMessageBytes = 64 << 20;
constexpr absl::Duration kMoving = absl::Seconds(1);  // for the router to take away what has not ended in the budget
constexpr int kMaxStreams = 16;                       // of one connection: the router's, its successor's, health checks
constexpr int kKeepaliveMs = 10'000;
constexpr int kMostGuesses = 256;  // of a step: each has logits, besides one row for every slot

std::string DrawInstanceId() {
  std::random_device random;
  return absl::StrFormat("%08x%08x%08x%08x", random(), random(), random(), random());
}

worker::v1::Ready DescribeWorker(const WorkerOptions& options, const ModelConfig& config,
                                 const std::string& fingerprint, const EngineOptions& engine,
                                 const std::vector<worker::v1::Drafter>& drafters) {
  worker::v1::Ready ready;
  ready.set_instance_id(DrawInstanceId());
  ready.set_worker_id(options.worker_id.empty() ? ready.instance_id() : options.worker_id);
  ready.mutable_model()->set_name(options.name());
  ready.mutable_model()->set_vocab_size(static_cast<uint32_t>(engine.limits.vocab_size));
  // The model's, not what the pool allows: the router knows the pool and refuses what does not fit by that name.
  ready.mutable_model()->set_max_context(static_cast<uint32_t>(std::min<int64_t>(config.max_position, INT32_MAX / 2)));
  ready.mutable_model()->mutable_eos_token_ids()->Assign(config.eos_token_ids.begin(), config.eos_token_ids.end());
  ready.mutable_model()->set_fingerprint(fingerprint);
  ready.set_num_blocks(static_cast<uint32_t>(engine.limits.num_blocks));
  ready.set_block_tokens(kBlockTokens);
  ready.set_num_slots(static_cast<uint32_t>(engine.limits.num_slots));
  *ready.mutable_step_cost() = engine.step_cost;
  ready.set_step_target_us(static_cast<uint32_t>(engine.step_target_us));
  ready.mutable_drafters()->Assign(drafters.begin(), drafters.end());
  return ready;
}

}  // namespace

WorkerServer::WorkerServer(std::unique_ptr<Engine> engine, worker::v1::Ready ready,
                           std::unique_ptr<WorkerAccess> access, const WorkerAddresses& addresses,
                           absl::Duration silence)
    : access_(std::move(access)),
      ready_(std::move(ready)),
      spans_(SpanExporter::Start(addresses.otlp_endpoint, {"millrace-worker", ready_.worker_id(), MILLRACE_VERSION})),
      metrics_(engine->options()),
      engine_(std::move(engine)),
      service_(*engine_, ready_, metrics_, spans_.get(), silence),
      readiness_(&health_, worker::v1::WorkerService::service_full_name(),
                 [this] { return Readiness::Sample{.ready = true, .progress = metrics_.SampleProgress(*engine_)}; }) {}

absl::StatusOr<std::unique_ptr<WorkerServer>> WorkerServer::Start(const WorkerOptions& options) {
  auto access = WorkerAccess::Open(options.tls, options.router_identity);
  if (!access.ok()) return access.status();
  auto fingerprint = ModelFingerprint(options.model);
  if (!fingerprint.ok()) return fingerprint.status();
  if (options.gpu() >= Stream::CountCuda()) {
    return absl::FailedPreconditionError(absl::StrCat("--device is ", options.device, "; this build and machine have ",
                                                      Stream::CountCuda(), " usable GPUs"));
  }
  const int max_logit_rows = options.max_slots + std::min(kMostGuesses, options.max_slots * kMaxDrafts);
  auto runner =
      ModelRunner::Load({.model_dir = options.model,
                         .kv_bytes = options.kv_bytes(),
                         .device_fraction = options.gpu_memory_fraction,
                         .max_slots = options.max_slots,
                         .max_rows = options.step_rows(),
                         .max_logit_rows = max_logit_rows,
                         .max_biases = max_logit_rows * kMaxBiasesOfASlot,
                         .draft_model_dir = options.draft_model,
                         .draft_layers = options.draft_layers},
                        options.gpu() < 0 ? Stream::OpenCpu(options.num_threads()) : Stream::OpenCuda(options.gpu()));
  if (!runner.ok()) return runner.status();
  const ModelConfig config = (*runner)->config();
  // Positions in the pool are counted in 32 bits.
  const int64_t num_blocks = (*runner)->num_blocks(), max_blocks = INT32_MAX / kBlockTokens;
  if (num_blocks > max_blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--kv_memory is ", options.kv_bytes(), ", ", num_blocks, " blocks; the limit is ", max_blocks));
  }
  auto draft_table = DraftTable::Load(std::filesystem::path(options.model) / DraftTable::kFileName, config.vocab_size);
  if (!draft_table.ok()) return draft_table.status();
  EngineOptions engine;
  engine.draft_table = *std::move(draft_table);
  engine.limits = {.num_slots = options.max_slots,
                   .num_blocks = static_cast<int32_t>(num_blocks),
                   .vocab_size = config.vocab_size,
                   .max_context = static_cast<int32_t>(std::min(config.max_position, num_blocks * kBlockTokens)),
                   .max_rows = options.step_rows(),
                   .max_logit_rows = max_logit_rows,
                   .draft_model = (*runner)->draft_model(),
                   .guesses_with_penalties = (*runner)->guesses_with_penalties()};
  engine.step_target_us = options.step_target_ms * 1000;
  engine.step_cost = MeasureStepCost(**runner, engine.limits);
  worker::v1::Ready ready =
      DescribeWorker(options, config, *fingerprint, engine, MeasureDrafters(**runner, engine.limits));
  return Serve(std::make_unique<Engine>(*std::move(runner), engine), std::move(ready), *std::move(access),
               {options.listen, options.metrics_listen, options.probe_listen, options.otlp_endpoint});
}

absl::StatusOr<std::unique_ptr<WorkerServer>> WorkerServer::Serve(std::unique_ptr<Engine> engine,
                                                                  worker::v1::Ready ready,
                                                                  std::unique_ptr<WorkerAccess> access,
                                                                  const WorkerAddresses& addresses,
                                                                  absl::Duration silence) {
  std::unique_ptr<WorkerServer> worker(
      new WorkerServer(std::move(engine), std::move(ready), std::move(access), addresses, silence));
  if (absl::Status status = worker->Listen(addresses); !status.ok()) return status;
  return worker;
}

absl::Status WorkerServer::Listen(const WorkerAddresses& addresses) {
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(addresses.listen, access_->ForRouters(), &port);
  builder.RegisterService(&service_);
  builder.RegisterService(&health_);
  SetServerLimits({.max_message_bytes = kMaxMessageBytes, .max_streams = kMaxStreams, .keepalive_ms = kKeepaliveMs},
                  &builder);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port == 0)
    return absl::UnavailableError(absl::StrCat("cannot listen on ", addresses.listen));
  auto address = ParseAddress(addresses.listen);
  if (!address.ok()) return address.status();
  address->port = port;
  address_ = address->ToString();
  if (!addresses.metrics_listen.empty()) {
    auto metrics = MetricsServer::Start(addresses.metrics_listen, [this](MetricPage* page) {
      metrics_.Fill(ready_, *engine_, readiness_, page);
      access_->Fill(page);
      if (spans_ != nullptr) spans_->Fill(page);
    });
    if (!metrics.ok()) return metrics.status();
    metrics_server_ = *std::move(metrics);
  }
  if (!addresses.probe_listen.empty()) {
    auto probe = ProbeServer::Start(addresses.probe_listen, &health_);
    if (!probe.ok()) return probe.status();
    probe_ = *std::move(probe);
  }
  Log(LogLevel::kInfo, "serving",
      {{"address", address_},
       {"metrics", metrics_address()},
       {"probes", probe_address()},
       {"model", ready_.model().name()},
       {"worker", ready_.worker_id()},
       {"slots", ready_.num_slots()},
       {"blocks", ready_.num_blocks()}});
  return absl::OkStatus();
}

void WorkerServer::Drain(absl::Duration budget) {
  readiness_.Drain();
  service_.Leave(budget);
  engine_->AwaitEmpty(budget + kMoving);
  service_.Part();
}

WorkerServer::~WorkerServer() {
  readiness_.Drain();
  health_.Shutdown();
  service_.Shutdown();
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
}

}  // namespace millrace
