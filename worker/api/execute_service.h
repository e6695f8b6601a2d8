// WorkerService: which router is obeyed. Hands each Execute call a stream and lets the one with the highest epoch have
// the engine. Thread-safe. Outlives its server's calls; the engine, the metrics and the exporter outlive
// it.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "millrace/worker/v1/worker.grpc.pb.h"
#include "service/span_exporter.h"
#include "worker/api/worker_metrics.h"
#include "worker/engine/engine.h"

namespace millrace {

class ExecuteStream;

class ExecuteService final : public worker::v1::WorkerService::CallbackService {
 public:
  // `spans` may be null. `silence`: what a router is never left without a message for, even while a step takes longer.
  ExecuteService(Engine& engine, worker::v1::Ready ready, WorkerMetrics& metrics, SpanExporter* spans,
                 absl::Duration silence);
  ~ExecuteService() override;

  grpc::ServerBidiReactor<worker::v1::RouterMessage, worker::v1::WorkerMessage>* Execute(
      grpc::CallbackServerContext* context) override;

  // Says goodbye to the router, which has `budget` to let its sequences end or to move them, and refuses new streams.
  void Leave(absl::Duration budget);
  // Ends the current stream once all reports are written. Waits for that, for a moment.
  void Part();
  // Ends the current stream with UNAVAILABLE and refuses new ones: the worker shuts down.
  void Shutdown();

  Engine& engine() const { return engine_; }
  const worker::v1::Ready& ready() const { return ready_; }
  WorkerMetrics& metrics() const { return metrics_; }
  SpanExporter* spans() const { return spans_; }

  // For streams. Begin: `stream` takes over with this epoch and is attached to the engine, which lets it answer Ready;
  // the one before it ends with ABORTED. ABORTED if a router of a higher epoch has ever been, FAILED_PRECONDITION if
  // one of the same epoch is connected.
  grpc::Status Begin(std::shared_ptr<ExecuteStream> stream, uint64_t epoch);
  void Forget(const ExecuteStream* stream);

 private:
  void RunPulse();
  bool Gone() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return current_ == nullptr; }

  Engine& engine_;
  const worker::v1::Ready ready_;
  WorkerMetrics& metrics_;
  SpanExporter* const spans_;

  absl::Mutex mutex_;  // before a stream's and the engine's
  std::shared_ptr<ExecuteStream> current_ ABSL_GUARDED_BY(mutex_);
  uint64_t highest_epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;

  const absl::Duration pulse_period_;
  bool pulse_ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread pulse_;  // last: it uses everything above
};

}  // namespace millrace
