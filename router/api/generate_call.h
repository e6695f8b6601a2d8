// One Generate call: gathers what its sequences produce and streams it, one write in flight; what comes meanwhile is
// merged into the next message. While a client does not keep up, its sequences are paused; what their leases still give
// must fit the bound, and the pause has an end. Owned by the CallRegistry, and by the fleet while a sequence lives. Any
// thread. Locks: fleet before inbox_mutex_; mutex_ before inbox_mutex_; the fleet is never called with either held.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/grpcpp.h"
#include "millrace/v1/inference.pb.h"
#include "router/api/call_record.h"
#include "router/api/call_registry.h"
#include "router/api/choice_stream.h"
#include "router/fleet/fleet.h"

namespace millrace {

class GenerateCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public SequenceSink {
 public:
  static constexpr size_t kPauseBytes = 32 << 10;  // waiting for the client; it goes on below half of it
  static constexpr size_t kMaxPendingBytes = 256 << 10;

  GenerateCall(Fleet* fleet, CallRegistry* registry, RequestMetrics* metrics, std::string request_id,
               std::vector<ChoiceStream> choices, Time arrived);

  // The sequences of its first choices, once they are submitted; the others are complete. Output waits for this.
  void Begin(std::vector<SequenceId> sequences, RequestTrace trace);
  // Ends the call with `status`, at once.
  void Abort(const grpc::Status& status);

  void Push(SequenceUpdate update) override;
  void Wake() override;

 private:
  void OnWriteDone(bool ok) override;
  void OnCancel() override { Abort(grpc::Status::CANCELLED); }
  void OnDone() override;

  // Both list the choices whose sequences are of no more use.
  std::vector<size_t> DrainInbox() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<size_t> Fail(const grpc::Status& status, bool drop_pending) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CancelSequences(const std::vector<size_t>& choices);
  // Tells the fleet whether to pause. Without any lock.
  void UpdatePause();
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t PendingBytes() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  Fleet* const fleet_;
  CallRegistry* const registry_;
  const std::string request_id_;

  absl::Mutex mutex_;
  CallRecord record_ ABSL_GUARDED_BY(mutex_);
  std::vector<ChoiceStream> choices_ ABSL_GUARDED_BY(mutex_);
  std::vector<SequenceId> sequences_ ABSL_GUARDED_BY(mutex_);  // of the first choices
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  size_t next_choice_ ABSL_GUARDED_BY(mutex_) = 0;  // whose turn it is to be written
  grpc::ByteBuffer out_ ABSL_GUARDED_BY(mutex_);    // of the write in flight
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool paused_ ABSL_GUARDED_BY(mutex_) = false;
  bool told_paused_ ABSL_GUARDED_BY(mutex_) = false;  // what the fleet knows of that, or is being told
  bool telling_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> failure_ ABSL_GUARDED_BY(mutex_);  // how the call will end, if not well

  absl::Mutex inbox_mutex_;
  std::vector<SequenceUpdate> inbox_ ABSL_GUARDED_BY(inbox_mutex_);
};

}  // namespace millrace
