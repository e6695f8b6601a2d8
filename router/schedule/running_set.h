// One worker as the router sees it: its slots, its block pool, and the edit that waits to be taken. It names blocks in
// the prefix index, hands out leases and knows what a released slot may still touch; which sequence comes or goes, the
// Scheduler decides. Lives as long as the worker's stream. Memory: 20 bytes per block, 200 per slot and 4 per block
// that a slot holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "router/schedule/block_pool.h"
#include "router/schedule/placement.h"
#include "router/schedule/prefix_index.h"
#include "router/schedule/sequence.h"
#include "router/schedule/speculation_policy.h"
#include "router/schedule/step_cost_fit.h"

namespace millrace {

struct RunningSlot {
  enum class State { kEmpty, kRunning, kReleasing };

  State state = State::kEmpty;
  Sequence* sequence = nullptr;
  uint64_t admit_edit = 0;           // the edit that carries its admission
  uint64_t admission = 0;            // counts the worker's admissions
  std::vector<BlockId> table;        // block by position
  uint32_t num_cached = 0;           // leading blocks that it found in the cache
  uint32_t num_named = 0;            // leading blocks that the prefix index knows
  uint32_t num_ready = 0;            // leading blocks that are cached or full of computed tokens
  uint32_t num_computed = 0;         // tokens
  uint32_t num_told = 0;             // leading blocks that the worker was told of
  uint32_t filler = kNone;           // the slot that must compute num_cached blocks first
  std::vector<uint32_t> dependents;  // slots that have named this one their filler; may be outdated
  int64_t rank = 0;                  // as of the latest RefreshRanks
  int64_t told_rank = 0;             // what the worker goes by
  double left = 0;                   // predicted seconds of prefill
  bool prefilling = false;
  DraftChoice draft;       // wanted
  DraftChoice told_draft;  // what the worker goes by, from this edit on
  uint64_t draft_edit = 0;
  bool draft_decided = false;
};

class RunningSet {
 public:
  RunningSet(WorkerId id, uint32_t place, const worker::v1::Ready& ready, const SchedulerOptions& options,
             const PrefixHasher* hasher, PrefixIndex* index);
  ~RunningSet();  // forgets the blocks' names

  // What the worker says that its blocks hold; before anything is admitted. INVALID_ARGUMENT if it cannot be so: then
  // this set is of no use.
  absl::Status Adopt(absl::Span<const worker::v1::CachedBlocks> cached, uint32_t vocab_size);

  WorkerId id() const { return id_; }
  const worker::v1::StepCost& cost() const { return fit_.cost(); }
  bool cost_is_measured() const { return fit_.confident(); }
  const BlockPool& pool() const { return pool_; }
  const std::vector<RunningSlot>& slots() const { return slots_; }
  int64_t pool_tokens() const { return int64_t{pool_.size()} * block_tokens_; }
  bool Told(const RunningSlot& slot) const { return slot.admit_edit <= last_edit_; }  // its admission was taken
  uint32_t num_used_slots() const { return num_used_slots_; }
  bool draining() const { return draining_; }
  void Drain() { draining_ = true; }
  // It is in the worker's steps, by the worker's own word: it may be what a step dies of.
  bool InStep(const RunningSlot& slot) const {
    return slot.state == RunningSlot::State::kRunning && slot.admit_edit <= applied_edit_ && slot.filler == kNone &&
           !OutOfRoom(slot);
  }
  // Something there can be computed: it has room, which a paused sequence soon has not, and waits for no filler.
  bool has_work() const {
    return std::any_of(slots_.begin(), slots_.end(), [&](const RunningSlot& slot) {
      return slot.state == RunningSlot::State::kRunning && slot.filler == kNone && !OutOfRoom(slot);
    });
  }
  bool open() const { return !draining_ && !free_slots_.empty() && hungry_.empty(); }

  // A worker that comes while others wait is not flooded: at first it seems to have its whole allowance of prefill as
  // soon as it has any, so that it gets one at a time, and less so with every prefill that it ends.
  void StartSlowly() { slow_start_ = kSlowStart; }
  double PrefillLeft() const;  // predicted seconds

  // Placement. Leading blocks of `depth` matched ones that the sequence can use: at least one token is left to compute.
  uint32_t UsableBlocks(const Sequence& sequence, uint32_t depth) const;
  WorkerLoad Load(int64_t rank, double output) const;
  // False, and nothing is changed, if its blocks and its lease do not fit now. REQUIRES: open().
  bool Admit(Sequence* sequence, const PrefixIndex::Match& match, Time now);
  // Puts the prefills in order as of now; if the worker would take them in another order, it is sent new ranks.
  void RefreshRanks(Time now);

  // Reports. The slot, null if it is being released and the report is older than that, or what breaks the contract.
  absl::StatusOr<RunningSlot*> ReportedSlot(uint32_t slot, uint64_t applied_edit);
  // Ends the quarantines of edits up to this one.
  absl::Status Applied(uint64_t edit);
  void Computed(RunningSlot* slot, uint32_t num_computed);
  void Appended(RunningSlot* slot, uint32_t num_tokens);  // the sequence has them already
  void Stalled(RunningSlot* slot);
  void Measured(const worker::v1::StepReport& report) {
    fit_.Add(report);
    ++reports_;
  }
  // So many tokens were guessed for it, and the first `right` of them were right; to be told before it goes.
  void Guessed(RunningSlot* slot, uint32_t guessed, uint32_t right, bool ended, uint64_t applied_edit);

  // The slot goes: at once if the worker has emptied it or does not know of it, otherwise with the next edit.
  // `poisoned`: what it computed is not to be found again. Returns the sequences that waited for its blocks, whose
  // slots have gone too.
  std::vector<Sequence*> Stop(uint32_t slot, bool emptied, bool poisoned = false);

  // Its sequence was paused or resumed.
  void PauseChanged(uint32_t slot);
  // Gives blocks to slots that were appended to and are not paused, preempting others where it must.
  struct Evicted {
    std::vector<Sequence*> preempted;
    std::vector<Sequence*> orphans;
  };
  Evicted GrowLeases();

  // Speculation. What the slots draft from the next edit on: nothing while somebody waits, here or in the queue.
  void DecideDrafts(bool others_wait);
  const SpeculationPolicy& speculation() const { return policy_; }
  double MeanDraftLength() const;  // of the decoding slots, as decided

  bool has_edit() const {
    return !admit_.empty() || !release_.empty() || !extend_.empty() || !rank_.empty() || !draft_.empty();
  }
  worker::v1::Edit TakeEdit();

 private:
  struct Quarantined {
    uint64_t edit;
    uint32_t slot;
    std::vector<BlockId> blocks;  // last first
  };

  static constexpr uint32_t kSlowStart = 16;  // prefills

  uint32_t IdOf(const RunningSlot& slot) const { return static_cast<uint32_t>(&slot - slots_.data()); }
  uint32_t TargetBlocks(const Sequence& sequence) const;
  uint32_t Reserve() const;
  void TakeBlocks(uint32_t num_blocks, std::vector<BlockId>* table);  // REQUIRES: there are so many
  bool Grow(RunningSlot* slot, uint32_t num_blocks);
  bool OutOfRoom(const RunningSlot& slot) const { return slot.sequence->length() > slot.table.size() * block_tokens_; }
  bool FreesBlocks(const RunningSlot& slot) const;
  RunningSlot* ChooseVictim(const RunningSlot& needy);
  bool Name(RunningSlot* slot, uint32_t filler);
  void NameAll(RunningSlot* slot, uint32_t filler);
  void Unname(BlockId block);
  void StopOne(RunningSlot* slot, bool emptied, bool poisoned, std::vector<uint32_t>* dependents);
  void LeavePrefill(RunningSlot* slot);
  void StopDrafting();
  void SetDraft(RunningSlot* slot, const DraftChoice& choice);
  void FillEdit(const RunningSlot& slot, worker::v1::Admit* admit) const;

  const WorkerId id_;
  const uint32_t place_;
  const double step_target_;
  const uint32_t block_tokens_;
  const uint32_t lease_tokens_ahead_;
  const double max_prefill_ahead_;  // seconds
  const int max_preemptions_;
  const PrefixHasher* const hasher_;
  PrefixIndex* const index_;

  StepCostFit fit_;
  SpeculationPolicy policy_;
  BlockPool pool_;
  std::vector<RunningSlot> slots_;
  std::vector<uint32_t> free_slots_;
  uint32_t num_used_slots_ = 0;
  bool draining_ = false;
  uint64_t num_admissions_ = 0;
  uint32_t slow_start_ = 0;  // prefills that it has yet to end

  std::vector<uint32_t> prefills_;  // by rank
  uint32_t decode_rows_ = 0;
  uint64_t decode_context_ = 0;
  uint64_t drafted_ahead_ = 0;     // lengths of all slots, as decided
  bool drafts_due_ = true;         // nothing was drafted for need: decide as soon as that is over
  uint32_t rows_at_decision_ = 0;  // decode_rows_ then
  uint32_t reports_ = 0;           // since then
  std::vector<SpeculationPolicy::Candidate> candidates_;  // scratch of DecideDrafts
  std::vector<uint32_t> touched_;                         // appended to since GrowLeases
  std::vector<uint32_t> hungry_;                          // out of room, oldest sequence first

  uint64_t last_edit_ = 0;  // taken
  uint64_t applied_edit_ = 0;
  std::deque<Quarantined> quarantine_;                             // by edit
  std::vector<uint32_t> release_, admit_, extend_, rank_, draft_;  // slots of the next edit
};

}  // namespace millrace
