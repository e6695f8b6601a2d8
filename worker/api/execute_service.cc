#include "worker/api/execute_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/api/execute_stream.h"

namespace millrace {

namespace {

constexpr absl::Duration kLastWrites = absl::Seconds(1);

}  // namespace

// Two pulses in a silence: a stream that spoke just before one is heard by the next.
ExecuteService::ExecuteService(Engine& engine, worker::v1::Ready ready, WorkerMetrics& metrics, SpanExporter* spans,
                               absl::Duration silence)
    : engine_(engine),
      ready_(std::move(ready)),
      metrics_(metrics),
      spans_(spans),
      pulse_period_(silence / 2),
      pulse_([this] { RunPulse(); }) {}

ExecuteService::~ExecuteService() {
  {
    absl::MutexLock lock(&mutex_);
    pulse_ends_ = true;
  }
  pulse_.join();
}

void ExecuteService::RunPulse() {
  mutex_.Lock();
  while (!mutex_.AwaitWithTimeout(absl::Condition(&pulse_ends_), pulse_period_)) {
    const std::shared_ptr<ExecuteStream> stream = current_;
    mutex_.Unlock();
    if (stream != nullptr) stream->Pulse();
    mutex_.Lock();
  }
  mutex_.Unlock();
}

grpc::ServerBidiReactor<worker::v1::RouterMessage, worker::v1::WorkerMessage>* ExecuteService::Execute(
    grpc::CallbackServerContext*) {
  return ExecuteStream::Start(*this);
}

grpc::Status ExecuteService::Begin(std::shared_ptr<ExecuteStream> stream, uint64_t epoch) {
  std::shared_ptr<ExecuteStream> previous;
  {
    absl::MutexLock lock(&mutex_);
    if (shut_down_ || leaving_) return {grpc::StatusCode::UNAVAILABLE, "the worker shuts down"};
    if (epoch < highest_epoch_ || (epoch == highest_epoch_ && current_ != nullptr)) {
      return {epoch < highest_epoch_ ? grpc::StatusCode::ABORTED : grpc::StatusCode::FAILED_PRECONDITION,
              absl::StrCat("hello.epoch is ", epoch, "; the limit is above ",
                           current_ == nullptr ? highest_epoch_ - 1 : highest_epoch_,
                           epoch == highest_epoch_ ? ", as that router is connected already" : "")};
    }
    highest_epoch_ = epoch;
    previous = std::exchange(current_, stream);
    metrics_.OnStream(true);
    engine_.Attach(std::move(stream));
  }
  if (previous != nullptr) {
    previous->End({grpc::StatusCode::ABORTED, absl::StrCat("a router with epoch ", epoch, " has taken over")});
  }
  return grpc::Status::OK;
}

void ExecuteService::Forget(const ExecuteStream* stream) {
  std::shared_ptr<ExecuteStream> last;  // ends after the lock does
  absl::MutexLock lock(&mutex_);
  if (current_.get() != stream) return;
  last = std::exchange(current_, nullptr);
  metrics_.OnStream(false);
}

void ExecuteService::Leave(absl::Duration budget) {
  std::shared_ptr<ExecuteStream> last;
  {
    absl::MutexLock lock(&mutex_);
    leaving_ = true;
    last = current_;
  }
  if (last != nullptr) last->SendGoodbye(static_cast<uint32_t>(absl::ToInt64Milliseconds(budget)));
}

void ExecuteService::Part() {
  std::shared_ptr<ExecuteStream> last;
  {
    absl::MutexLock lock(&mutex_);
    last = current_;
  }
  if (last == nullptr) return;
  last->EndAfterWrites();
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(this, &ExecuteService::Gone), kLastWrites);
}

void ExecuteService::Shutdown() {
  std::shared_ptr<ExecuteStream> last;
  {
    absl::MutexLock lock(&mutex_);
    shut_down_ = true;
    last = current_;
  }
  if (last != nullptr) last->End({grpc::StatusCode::UNAVAILABLE, "the worker shuts down"});
}

}  // namespace millrace
