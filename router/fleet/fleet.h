// All workers of this router, and the lock around the Scheduler that decides for them. Inputs come from client calls,
// worker streams and one timer thread; after each, still under the lock, what the scheduler wants done is taken over,
// and then, without it, edits are written and sinks woken. Any thread may call. Lives from start-up to the end of the
// process.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "millrace/v1/admin.pb.h"
#include "router/fleet/liveness.h"
#include "router/fleet/resolver.h"
#include "router/fleet/sequence_sink.h"
#include "router/fleet/worker_session.h"
#include "router/schedule/scheduler.h"

namespace millrace {

struct FleetOptions {
  std::string router_id;
  uint64_t epoch = 1;                  // later routers have higher ones
  std::vector<std::string> addresses;  // of the workers, distinct
  std::vector<Address> services;       // names, each of as many workers as it has addresses
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();  // towards workers
  Resolver::Lookup lookup = LookUpHost;
  absl::Duration resolve_period = absl::Seconds(5);  // as often as a headless service's records may change
  uint32_t tokenizer_vocab = 0;                      // a model with fewer ids is refused
  SchedulerOptions scheduler;
  std::function<void()> on_first_ready;  // called once, when the first worker is ready
  std::function<void()> on_taken_over;   // called once, when a router of a higher epoch has come
};

// UNAVAILABLE: what a router says whose workers obey another.
absl::Status TakenOver();

class Fleet final : private WorkerSession::Listener {
 public:
  explicit Fleet(FleetOptions options);
  ~Fleet();  // stops
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  void Start();
  void Stop();  // ends all streams and waits for that; sinks get nothing more

  // Sequences of one request; `sink` gets their updates, from before this returns until each has ended or been
  // cancelled.
  absl::StatusOr<std::vector<SequenceId>> Submit(std::vector<SequenceSpec> specs, std::shared_ptr<SequenceSink> sink);
  // Ends a sequence: no update follows. Nothing if it had ended already; then its last update has been pushed.
  std::optional<SequenceOutcome> Cancel(SequenceId sequence);
  // For those whose client does not read: Scheduler::SetPaused.
  void SetPaused(const std::vector<SequenceId>& sequences, bool paused);
  // No more admissions there; what has not ended after `budget` goes on elsewhere.
  absl::Status DrainWorker(const std::string& worker_id, Time budget);

  SchedulerCounts counts() const;
  std::vector<v1::WorkerStatus> workers() const;
  std::optional<worker::v1::Model> model() const;  // nothing until a worker has come
  int64_t max_sequence_tokens()
      const;  // what the context and the largest pool allow; of the last workers when there are none
  uint32_t num_ready_workers() const;
  double longest_prefill() const;  // predicted seconds of what lies at the worker that has most

 private:
  // An address, given or found. Connecting, waiting for Ready, ready, or between two connections.
  struct Member {
    std::string address;
    std::string service;                           // that it was found behind; empty: given
    bool listed = true;                            // still found there; if not, its stream may go on until it ends
    std::unique_ptr<WorkerSession> session;        // null between connections
    std::unique_ptr<WorkerSession> ended;          // the one before, until a thread of ours may delete it
    std::optional<WorkerId> worker;                // while ready
    worker::v1::Ready ready;                       // the latest
    std::vector<worker::v1::CachedBlocks> cached;  // come before the next Ready
    size_t cached_bytes = 0;
    v1::WorkerStatus::State state = v1::WorkerStatus::STATE_CONNECTING;
    std::string last_error;
    std::optional<Liveness> liveness;  // likewise
    bool draining = false;             // this instance, or about to leave
    bool leaving = false;              // it has said goodbye
    bool ended_by_us = false;          // last_error says why
    uint32_t faults = 0;
    uint32_t short_lives = 0;  // in sequence, each ended by a fault
    Time rest = 0;             // the breaker: not to be connected for so long
    Time backoff = 0;
    Time ready_at = 0;
    Time wake_at = 0;        // without a session: connect; with one that is not ready: give up; else kNever
    Time empty_at = kNever;  // draining: what still runs there is moved
  };
  struct Live {
    std::shared_ptr<SequenceSink> sink;  // shared with the client call, which may end first
    int choice;
  };
  // What one input leaves to do without the lock.
  struct Output {
    std::vector<std::pair<WorkerSession*, worker::v1::Edit>> edits;  // claimed
    std::vector<std::shared_ptr<SequenceSink>> sinks;                // pushed to
  };

  void OnMessage(WorkerSession* session, worker::v1::WorkerMessage& message) override;
  void OnWritable(WorkerSession* session) override;
  void OnEnd(WorkerSession* session, const grpc::Status& status) override;

  Output TakeOutput() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Deliver(Output output);
  absl::Status OnCached(Member& member, worker::v1::CachedBlocks& cached) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends all sequences with UNAVAILABLE. The sinks to wake.
  std::vector<std::shared_ptr<SequenceSink>> OnTakenOver(Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool OnReady(size_t id, const worker::v1::Ready& ready, Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckIdentity(const worker::v1::Ready& ready) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Drain(Member& member, Time budget, Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Refuse(Member& member, const absl::Status& why, Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Lose(Member& member, Loss loss, Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WorkerName(WorkerId worker) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  void RunTimer();
  Time NextWake() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void SetWake(Member& member, Time when) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The sessions to start; those to delete go to `ended`.
  std::vector<WorkerSession*> WakeMembers(Time now, std::vector<std::unique_ptr<WorkerSession>>* ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnResolved(const Address& service, const std::vector<std::string>& addresses);
  void AddMember(const std::string& address, const std::string& service) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LookAtWorkers(Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool NoSessions() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const FleetOptions options_;
  std::thread timer_;
  std::unique_ptr<Resolver> resolver_;  // between Start and Stop, with services

  mutable absl::Mutex mutex_;
  Scheduler scheduler_ ABSL_GUARDED_BY(mutex_);
  std::map<size_t, Member> members_ ABSL_GUARDED_BY(mutex_);  // by a number that is never used again
  size_t next_member_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<WorkerId, size_t> member_of_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<SequenceId, Live> live_ ABSL_GUARDED_BY(mutex_);
  int64_t max_sequence_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  bool any_ready_ ABSL_GUARDED_BY(mutex_) = false;
  Time members_due_ ABSL_GUARDED_BY(mutex_) = 0;   // the earliest wake_at or empty_at
  Time look_at_ ABSL_GUARDED_BY(mutex_) = kNever;  // when the ready workers are looked at again
  Time timer_due_ ABSL_GUARDED_BY(mutex_) = 0;     // what the timer thread waits for
  bool timer_poked_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool taken_over_ ABSL_GUARDED_BY(mutex_) = false;  // a worker obeys a router of a higher epoch
};

}  // namespace millrace
