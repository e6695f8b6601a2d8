// What the Scheduler holds, shared by its source files: scheduler.cc (results, endings), scheduler_submit.cc,
// scheduler_pause.cc, scheduler_fleet.cc, scheduler_suspects.cc, scheduler_apply.cc and scheduler_dispatch.cc. Memory:
// that of its parts; sequences are kept until their last event was taken.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "router/schedule/admission_queue.h"
#include "router/schedule/prefix_hash.h"
#include "router/schedule/prefix_index.h"
#include "router/schedule/quarantine.h"
#include "router/schedule/running_set.h"
#include "router/schedule/scheduler.h"
#include "router/schedule/sequence.h"

namespace millrace {

struct Scheduler::State {
  explicit State(const SchedulerOptions& given) : options(given), hasher(given.hash_key) {}

  struct Worker {
    std::unique_ptr<RunningSet> set;
    uint64_t steps = 0;
    uint32_t last_step_us = 0;
    DraftCounts drafts;
  };

  // For one dispatch: what is promised to those before in the queue.
  struct Candidate {
    bool open = false;
    double promised = 0;  // seconds of prefill
  };

  // Fleet.
  uint32_t PlaceOf(WorkerId worker) const;  // kNone: no such worker
  RunningSet& Change(uint32_t place);       // whoever changes a set takes it from here
  void UpdateLargestPool(Time now);
  void ReserveIndex();
  absl::Status CheckReady(const worker::v1::Ready& ready) const;

  // Sequences.
  absl::Status CheckSpec(const SequenceSpec& spec) const;
  std::unique_ptr<Sequence> Make(SequenceSpec spec, Time now);
  void Enqueue(Sequence* sequence, Time now);  // predicts its prefill first
  void Predict(Sequence* sequence);            // into `left`, and `match`
  void Return(Sequence* sequence, Time now);   // from a worker, to the front of its priority
  void Return(const RunningSet::Evicted& evicted, Time now);
  void Detach(Sequence* sequence, Time now);  // from the queue or its worker
  void End(Sequence* sequence);               // it is detached
  void Fail(Sequence* sequence, absl::Status status);
  void FailTooLong(Sequence* sequence);
  void SetDue(Sequence* sequence, Time pause_ends);  // and keeps `deadlines` in step
  void ExpireDeadlines(Time now);

  // Suspicion: see scheduler_suspects.cc.
  std::vector<Sequence*> Guilty(std::vector<Sequence*> in_step);  // a worker has died in a step of these
  bool IsSuspect(const Sequence& sequence) const;
  void GotFurther(Sequence* sequence) const;
  bool MayRun(const Sequence& sequence) const;
  void Quarantine(Sequence* sequence, Time now);
  PrefixHash ContentOf(const PrefixHash& root, const std::vector<int32_t>& prompt, size_t num_prompt,
                       worker::v1::Sampling sampling) const;
  absl::Status CheckContent(const SequenceSpec& spec, Time now);

  // What the queue takes.
  using Sequences = std::vector<std::unique_ptr<Sequence>>;
  absl::Status CheckDeadline(Sequence* sequence, Time now);
  absl::Status MakeRoom(const Sequences& comers, Time now);
  absl::Status Busy(std::string message) const;                           // RESOURCE_EXHAUSTED, with kRetryAfterMs
  bool Misses(const Sequence& sequence, double seconds, Time now) const;  // its deadline

  // Placement.
  void FindPrefix(Sequence* sequence);  // into `match`
  double PrefillLeft(const RunningSet& set, const Sequence& sequence, uint32_t depth) const;
  void Dispatch(Time now);
  void DecideDrafts();
  int DispatchFirst(Time now);
  enum class Outcome { kAdmitted, kWaits, kAllBusy };
  Outcome Place(Sequence* sequence, Time now);
  void Admitted(Sequence* sequence, Time now);

  // Reports.
  absl::Status ApplyProgress(Worker* worker, const worker::v1::Progress& progress, uint64_t applied_edit);
  absl::Status ApplyRow(Worker* worker, const worker::v1::Row& row, uint64_t applied_edit, Time now);
  absl::Status CheckRow(const RunningSet& set, const RunningSlot& slot, const worker::v1::Row& row) const;
  void CountGuesses(Worker* worker, RunningSlot* slot, const worker::v1::Row& row, uint64_t applied_edit);

  const SchedulerOptions options;
  const PrefixHasher hasher;
  std::optional<worker::v1::Model> model;
  uint32_t block_tokens = 0;
  int64_t largest_pool = 0;        // tokens; of the last worker's, while there are none
  worker::v1::StepCost last_cost;  // of the latest worker: for limits
  std::optional<PrefixIndex> index;
  std::vector<Worker> workers;    // by place; without a set: a free place
  std::vector<uint32_t> changed;  // places whose sets may have changed since draft lengths were decided
  bool drafts_yield = false;      // as they were decided: the queue was not empty
  absl::flat_hash_map<WorkerId, uint32_t> places;
  WorkerId next_worker = 1;

  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences;
  SequenceId next_sequence = 1;
  AdmissionQueue queue;
  absl::btree_set<std::pair<Time, SequenceId>> deadlines;  // by due()
  int64_t num_parked = 0;
  std::vector<SequenceEvent> events;
  bool any_cancelled = false;     // since events were taken: some of `events` may be nobody's
  std::vector<SequenceId> ended;  // their last event is in `events`, or they were cancelled
  std::vector<SequenceId> taken;  // their last event was among the latest taken

  SequenceId on_trial = 0;  // the suspect that was admitted last
  QuarantinedContents quarantined;
  double expected_output = 256;  // tokens; follows what ends
  struct Matched {
    SequenceId sequence = 0;
    uint32_t length = 0;
    uint64_t changes = 0;  // of the index
    size_t num_workers = 0;
    bool operator==(const Matched&) const = default;
  };
  PrefixIndex::Match match;           // scratch of dispatch
  Matched matched;                    // what `match` is of
  std::vector<Candidate> candidates;  // by place
  std::vector<Sequence*> first;
  SchedulerCounts counts;
};

}  // namespace millrace
