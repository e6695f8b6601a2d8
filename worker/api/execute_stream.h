// One Execute call: reads messages, posts edits to the engine, writes reports. Thread-safe: reactions come from gRPC's
// threads, reports from the engine's. One write is in flight; further reports wait in a queue of at most
// kMaxPendingReports and kMaxPendingBytes, past which the stream ends with RESOURCE_EXHAUSTED, so that a router that
// does not read never holds up a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "millrace/worker/v1/worker.grpc.pb.h"
#include "worker/api/execute_service.h"
#include "worker/api/sequence_spans.h"
#include "worker/engine/engine.h"

namespace millrace {

class ExecuteStream final : public grpc::ServerBidiReactor<worker::v1::RouterMessage, worker::v1::WorkerMessage>,
                            public ReportSink {
 public:
  static constexpr size_t kMaxPendingReports = 1024;
  static constexpr size_t kMaxPendingBytes = 64 << 20;

  // Owned by the call until OnDone, and by the service and the engine while they may still speak to it.
  static ExecuteStream* Start(ExecuteService& service);

  void SendGoodbye(uint32_t budget_ms);
  // Called at a steady pace: repeats what was last reported if nothing has been sent since the call before.
  void Pulse();
  // Ends the call, once, and gives up the engine.
  void End(const grpc::Status& status);
  // Likewise, once everything that waits has been written.
  void EndAfterWrites();

  // ReportSink. OnBegin sends what the router is to know first, and Ready.
  void OnBegin(std::vector<worker::v1::CachedBlocks> cached) override;
  void OnReport(worker::v1::StepReport report) override;
  void OnError(absl::Status status) override;

  // ServerBidiReactor
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  explicit ExecuteStream(ExecuteService& service)
      : service_(service), metrics_(service.metrics()), spans_(service.spans()) {}

  grpc::Status OnHello(const worker::v1::Hello& hello);
  grpc::Status OnMessage();
  void ReadNext();
  void Send(worker::v1::WorkerMessage message);
  bool Queue(worker::v1::WorkerMessage message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // false: no room
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Written() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !writing_ && pending_.empty(); }

  ExecuteService& service_;
  WorkerMetrics& metrics_;  // outlives the engine, which may report once more when the service has gone
  SequenceSpans spans_;
  std::shared_ptr<ExecuteStream> self_;  // the call's share of the ownership
  worker::v1::RouterMessage incoming_;   // of the reader alone: one read at a time
  bool greeted_ = false;                 // likewise

  absl::Mutex mutex_;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;  // Ready is on its way: reports and a goodbye may follow
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // Finish has been called: nothing may be started after it
  bool ends_when_written_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool sent_since_pulse_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t last_step_ ABSL_GUARDED_BY(mutex_) = 0;  // of the last report
  uint64_t last_applied_edit_ ABSL_GUARDED_BY(mutex_) = 0;
  worker::v1::WorkerMessage outgoing_;  // gRPC reads it while writing_
  std::deque<worker::v1::WorkerMessage> pending_ ABSL_GUARDED_BY(mutex_);
  size_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace millrace
