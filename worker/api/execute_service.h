// WorkerService: which router is obeyed. Hands each Execute call a stream and lets the one with the highest epoch have
// the engine. Thread-safe. Outlives its server's calls; the engine outlives it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "millrace/worker/v1/worker.grpc.pb.h"
#include "worker/engine/engine.h"

namespace millrace {

class ExecuteStream;

class ExecuteService final : public worker::v1::WorkerService::CallbackService {
 public:
  ExecuteService(Engine& engine, worker::v1::Ready ready);
  ~ExecuteService() override;

  grpc::ServerBidiReactor<worker::v1::RouterMessage, worker::v1::WorkerMessage>* Execute(
      grpc::CallbackServerContext* context) override;

  // Ends the current stream with UNAVAILABLE and refuses new ones: the worker shuts down.
  void Shutdown();

  Engine& engine() const { return engine_; }

  // For streams. Begin: `stream` takes over with this epoch, is answered Ready and attached to the engine; the one
  // before it ends with ABORTED. FAILED_PRECONDITION if a router of the same epoch is connected, or one of a higher
  // epoch has ever been.
  grpc::Status Begin(std::shared_ptr<ExecuteStream> stream, uint64_t epoch);
  void Forget(const ExecuteStream* stream);

 private:
  Engine& engine_;
  const worker::v1::Ready ready_;

  absl::Mutex mutex_;  // before a stream's and the engine's
  std::shared_ptr<ExecuteStream> current_ ABSL_GUARDED_BY(mutex_);
  uint64_t highest_epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace millrace
