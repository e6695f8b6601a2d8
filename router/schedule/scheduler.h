// The core of the router: which sequence runs where, in which blocks, and what each worker must change for it. A pure
// object: no gRPC, no thread, no clock, no random source; time and seeds are arguments, and equal calls give equal
// results. Lives as long as the router; the caller serialises access.
//
// Call pattern: any input (Submit, Cancel, AddWorker, RemoveWorker, Apply, Advance), then TakeEdit for every worker
// that PendingWorkers() names, and TakeEvents.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "millrace/worker/v1/worker.pb.h"

namespace millrace {

using Time = int64_t;  // microseconds on a monotonic clock
inline constexpr Time kNever = std::numeric_limits<Time>::max();
using SequenceId = uint64_t;  // never reused
using WorkerId = uint32_t;    // never reused: a worker that comes back is another one

struct SchedulerOptions {
  int64_t max_queued_sequences = 4096;   // further ones are refused
  int64_t max_queued_tokens = 64 << 20;  // prompt tokens in the queue
  Time max_prefill_ahead = 250'000;      // predicted prefill sent to a worker before it is needed
  int lease_tokens_ahead = 64;           // room that a slot holds beyond the tokens it has
  int max_preemptions = 2;               // of one sequence; then it is pinned
  Time max_pause = 30'000'000;           // for which a paused sequence is kept
  bool speculation = true;               // workers that can are told to draft where that pays
  uint64_t hash_key[2] = {0, 0};  // of the prefix index; drawn at start-up, so that collisions cannot be prepared
};

// Payload of a refusal that may be tried again: milliseconds to wait before, in decimal.
inline constexpr char kRetryAfterMs[] = "millrace.retry_after_ms";

// One output to generate; a request with n choices is n of them, submitted together, and shares the prompt's blocks.
struct SequenceSpec {
  std::vector<int32_t> prompt;  // at least one token; with spare capacity the answer follows without a copy
  std::vector<int32_t> output;  // generated before, elsewhere: it goes on after them; fewer than max_tokens
  worker::v1::Sampling sampling;
  std::vector<int32_t> stop_token_ids;
  int32_t min_tokens = 0;
  int32_t max_tokens = 0;  // >= 1
  std::string cache_salt;
  std::string traceparent;  // passed on to its workers; empty: none
  std::string tenant;       // who shares fairly with whom; empty: nobody's
  int priority = 0;         // higher goes first
  Time deadline = kNever;   // a queued sequence never starts after it, a running one is stopped
};

struct SequenceEvent {
  SequenceId sequence = 0;
  absl::InlinedVector<int32_t, 4> token_ids;
  std::vector<worker::v1::LogProbs> logprobs;         // one per token, where asked for
  std::vector<worker::v1::LogProbs> prompt_logprobs;  // all of them, with or before the first token
  // Set in the last event of a sequence. An error status (DEADLINE_EXCEEDED, INTERNAL for non-finite logits,
  // RESOURCE_EXHAUSTED …) or a finish reason.
  bool finished = false;
  absl::Status status;
  worker::v1::FinishReason finish_reason = worker::v1::FINISH_REASON_UNSPECIFIED;
};

// What became of a sequence so far; kept until its last event has been taken.
struct SequenceReport {
  int32_t prompt_tokens = 0;
  int32_t generated_tokens = 0;
  int32_t predicted_cached_tokens = 0;                                // at placement
  int32_t cached_tokens = 0;                                          // at the first admission
  Time submitted = 0, admitted = 0, first_token = 0, last_token = 0;  // 0: not yet
  int preemptions = 0;
  int moves = 0;
  int64_t drafts = 0;           // steps with any guess
  int64_t drafted_tokens = 0;   // guessed
  int64_t accepted_tokens = 0;  // of those, the ones that were right
  WorkerId worker = 0;          // the last one; meaningful once admitted
};

// Why a worker is gone: it failed (a crash, a hang, a breach of the contract), or it left or was left in order.
enum class Loss { kFault, kLeft };

inline constexpr int kDraftPositions = 16;  // the most that a sequence can draft in a step

// What speculation brought so far.
struct DraftCounts {
  uint64_t drafts = 0;                                  // rows with any guess
  uint64_t drafted = 0, accepted = 0;                   // tokens
  std::array<uint64_t, kDraftPositions> accepted_at{};  // by position of the guess
};

struct WorkerCounts {
  uint32_t slots = 0, used_slots = 0;
  uint32_t blocks = 0, free_blocks = 0, used_blocks = 0, cached_blocks = 0, quarantined_blocks = 0;
  uint64_t steps = 0;
  uint32_t last_step_us = 0;
  bool draining = false;
  DraftCounts drafts;
  double draft_length = 0;  // tokens that it is told to draft a step, mean of the decoding sequences
};

struct SchedulerCounts {
  int64_t queued = 0, running = 0;
  int64_t queued_tokens = 0;  // of prompts
  int64_t paused = 0;         // of those queued and running
  uint64_t finished = 0, refused = 0, shed = 0, generated_tokens = 0, prompt_tokens = 0, cached_tokens = 0,
           preemptions = 0;
  DraftCounts drafts;  // of all workers, those that are gone among them
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options);
  ~Scheduler();

  // Fleet. All workers serve one model; the first one's description is the model. INVALID_ARGUMENT if another differs,
  // or if `cached`, what its blocks hold from an earlier stream, cannot be so. A draining one gets nothing.
  absl::StatusOr<WorkerId> AddWorker(const worker::v1::Ready& ready, Time now,
                                     absl::Span<const worker::v1::CachedBlocks> cached = {}, bool draining = false);
  // Its sequences go back to the queue with the tokens they have; but one that may well be what its workers die of
  // fails with INTERNAL, and its content is refused for a while.
  void RemoveWorker(WorkerId worker, Time now, Loss loss = Loss::kFault);
  // No more admissions there.
  void DrainWorker(WorkerId worker);
  // What runs there goes back to the queue.
  void EmptyWorker(WorkerId worker, Time now);
  // Predicted seconds of the prefill that lies there; nothing if the worker has nothing that it could compute.
  std::optional<double> WorkLeft(WorkerId worker) const;
  // An error means that the report breaks the contract: the caller ends the stream and removes the worker.
  absl::Status Apply(WorkerId worker, const worker::v1::StepReport& report, Time now);

  // Sequences. INVALID_ARGUMENT, OUT_OF_RANGE (context), RESOURCE_EXHAUSTED (pool; queue, a deadline that cannot be
  // met: with kRetryAfterMs), UNAVAILABLE (no worker ever seen), FAILED_PRECONDITION (quarantined content). Either all
  // are taken or none. A full queue sheds the heaviest of what waits, which ends with that status too, if that is
  // heavier than what comes.
  absl::StatusOr<std::vector<SequenceId>> Submit(std::vector<SequenceSpec> specs, Time now);
  // Ends it without an event; its memory is given back with the next edit.
  void Cancel(SequenceId sequence, Time now);
  // Takes it from its worker; it goes back to the queue with the tokens it has. Nothing if it does not run.
  void Requeue(SequenceId sequence, Time now);

  // A paused sequence keeps its slot and its blocks, but gets no more of them: it stalls when its lease is used up. It
  // is the first to yield its blocks to others, and then waits, outside the queue, to be resumed. Paused for max_pause,
  // it fails with RESOURCE_EXHAUSTED. Nothing if it has ended.
  void SetPaused(SequenceId sequence, bool paused, Time now);

  // Lets time pass: deadlines. NextDeadline is when that is needed next.
  void Advance(Time now);
  Time NextDeadline() const;

  // Results of the calls above.
  std::vector<WorkerId> PendingWorkers() const;  // those with an edit to take
  worker::v1::Edit TakeEdit(WorkerId worker);
  std::vector<SequenceEvent> TakeEvents();
  SequenceReport Report(
      SequenceId sequence) const;  // REQUIRES: its last event has not been taken, or was the latest taken

  SchedulerCounts counts() const;
  WorkerCounts worker_counts(WorkerId worker) const;
  int64_t max_sequence_tokens() const;     // of the largest pool: prompt and output together; 0 without workers
  const worker::v1::Model* model() const;  // null until a worker has come

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace millrace
