#include "worker/api/worker_server.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/server_builder.h"
#include "service/address.h"
#include "worker/api/fingerprint.h"
#include "worker/engine/step_cost.h"
#include "worker/model/model_runner.h"

namespace millrace {
namespace {

constexpr int kMaxMessageBytes = 64 << 20;
constexpr absl::Duration kMoving = absl::Seconds(1);  // for the router to take away what has not ended in the budget
constexpr int kMaxStreams = 16;                       // of one connection: the router's, its successor's, health checks

std::string DrawInstanceId() {
  std::random_device random;
  return absl::StrFormat("%08x%08x%08x%08x", random(), random(), random(), random());
}

worker::v1::Ready DescribeWorker(const WorkerOptions& options, const ModelConfig& config,
                                 const std::string& fingerprint, const EngineOptions& engine) {
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
  return ready;
}

}  // namespace

WorkerServer::WorkerServer(std::unique_ptr<Engine> engine, worker::v1::Ready ready, absl::Duration silence)
    : engine_(std::move(engine)), service_(*engine_, std::move(ready), silence) {}

absl::StatusOr<std::unique_ptr<WorkerServer>> WorkerServer::Start(const WorkerOptions& options) {
  auto fingerprint = ModelFingerprint(options.model);
  if (!fingerprint.ok()) return fingerprint.status();
  if (options.gpu() >= Stream::CountCuda()) {
    return absl::FailedPreconditionError(absl::StrCat("--device is ", options.device, "; this build and machine have ",
                                                      Stream::CountCuda(), " usable GPUs"));
  }
  auto runner =
      ModelRunner::Load({.model_dir = options.model,
                         .kv_bytes = options.kv_bytes(),
                         .device_fraction = options.gpu_memory_fraction,
                         .max_slots = options.max_slots,
                         .max_rows = options.step_rows(),
                         .max_logit_rows = options.max_slots,
                         .max_biases = options.max_slots * kMaxBiasesOfASlot},
                        options.gpu() < 0 ? Stream::OpenCpu(options.num_threads()) : Stream::OpenCuda(options.gpu()));
  if (!runner.ok()) return runner.status();
  const ModelConfig config = (*runner)->config();
  // Positions in the pool are counted in 32 bits.
  const int64_t num_blocks = (*runner)->num_blocks(), max_blocks = INT32_MAX / kBlockTokens;
  if (num_blocks > max_blocks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--kv_memory is ", options.kv_bytes(), ", ", num_blocks, " blocks; the limit is ", max_blocks));
  }
  EngineOptions engine;
  engine.limits = {.num_slots = options.max_slots,
                   .num_blocks = static_cast<int32_t>(num_blocks),
                   .vocab_size = config.vocab_size,
                   .max_context = static_cast<int32_t>(std::min(config.max_position, num_blocks * kBlockTokens)),
                   .max_rows = options.step_rows(),
                   .max_logit_rows = options.max_slots};
  engine.step_target_us = options.step_target_ms * 1000;
  engine.step_cost = MeasureStepCost(**runner, engine.limits);
  worker::v1::Ready ready = DescribeWorker(options, config, *fingerprint, engine);
  return Serve(std::make_unique<Engine>(*std::move(runner), engine), std::move(ready), options.listen);
}

absl::StatusOr<std::unique_ptr<WorkerServer>> WorkerServer::Serve(std::unique_ptr<Engine> engine,
                                                                  worker::v1::Ready ready, const std::string& listen,
                                                                  absl::Duration silence) {
  std::unique_ptr<WorkerServer> worker(new WorkerServer(std::move(engine), std::move(ready), silence));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&worker->service_);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // two workers never share an address
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  worker->server_ = builder.BuildAndStart();
  if (worker->server_ == nullptr || port == 0) return absl::UnavailableError(absl::StrCat("cannot listen on ", listen));
  auto address = ParseAddress(listen);
  if (!address.ok()) return address.status();
  address->port = port;
  worker->address_ = address->ToString();
  worker->server_->GetHealthCheckService()->SetServingStatus("millrace.worker.v1.WorkerService", true);
  return worker;
}

void WorkerServer::Drain(absl::Duration budget) {
  server_->GetHealthCheckService()->SetServingStatus(false);
  service_.Leave(budget);
  engine_->AwaitEmpty(budget + kMoving);
  service_.Part();
}

WorkerServer::~WorkerServer() {
  service_.Shutdown();
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
}

}  // namespace millrace
