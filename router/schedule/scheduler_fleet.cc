// Workers come, drain and go.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/check.h"
#include "router/schedule/scheduler_state.h"

namespace millrace {
namespace {

constexpr uint32_t kMaxBlocks = 1 << 26;
constexpr uint32_t kMaxBlockTokens = 1 << 16;

absl::Status CheckRange(const char* name, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " ", value, " is not within ", least, " … ", most));
}

template <class Value>
absl::Status CheckSame(const char* name, const Value& value, const Value& expected) {
  if (value == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " ", value, " differs from the cluster's ", expected));
}

std::string EosText(const worker::v1::Model& model) {
  return absl::StrCat("[", absl::StrJoin(model.eos_token_ids(), ", "), "]");
}

}  // namespace

absl::Status Scheduler::State::CheckReady(const worker::v1::Ready& ready) const {
  const worker::v1::Model& its = ready.model();
  absl::Status status;
  status.Update(CheckRange("num_blocks", ready.num_blocks(), 1, kMaxBlocks));
  status.Update(CheckRange("block_tokens", ready.block_tokens(), 1, kMaxBlockTokens));
  status.Update(CheckRange("num_slots", ready.num_slots(), 1, PrefixIndex::kMaxSlots));
  status.Update(CheckRange("vocab_size", its.vocab_size(), 1, INT32_MAX));
  status.Update(CheckRange("max_context", its.max_context(), 1, 1 << 30));
  const worker::v1::StepCost& cost = ready.step_cost();
  for (const double part :
       {cost.step_us(), cost.prefill_token_us(), cost.prefill_context_ns(), cost.row_us(), cost.context_ns()}) {
    if (std::isfinite(part) && part >= 0 && part <= 1e9) continue;
    status.Update(absl::InvalidArgumentError(absl::StrCat("step_cost holds ", part, ", which is not within 0 … 1e9")));
  }
  status.Update(SpeculationPolicy::CheckDrafters(ready));
  if (!status.ok() || !model.has_value()) return status;
  status.Update(CheckSame("block_tokens", ready.block_tokens(), block_tokens));
  status.Update(CheckSame("model name", its.name(), model->name()));
  status.Update(CheckSame("vocab_size", its.vocab_size(), model->vocab_size()));
  status.Update(CheckSame("max_context", its.max_context(), model->max_context()));
  status.Update(CheckSame("eos_token_ids", EosText(its), EosText(*model)));
  status.Update(CheckSame("fingerprint", its.fingerprint(), model->fingerprint()));
  return status;
}

absl::StatusOr<WorkerId> Scheduler::AddWorker(const worker::v1::Ready& ready, Time now,
                                              absl::Span<const worker::v1::CachedBlocks> cached, bool draining) {
  State& state = *state_;
  if (absl::Status status = state.CheckReady(ready); !status.ok()) return status;
  if (!state.model.has_value()) {
    state.model = ready.model();
    state.block_tokens = ready.block_tokens();
    state.index.emplace(ready.block_tokens());
  }
  const auto free = std::find_if(state.workers.begin(), state.workers.end(),
                                 [](const auto& worker) { return worker.set == nullptr; });
  const auto place = static_cast<uint32_t>(free - state.workers.begin());
  if (free == state.workers.end()) state.workers.emplace_back();
  const WorkerId id = state.next_worker++;
  auto set = std::make_unique<RunningSet>(id, place, ready, state.options, &state.hasher, &*state.index);
  if (absl::Status status = set->Adopt(cached, ready.model().vocab_size()); !status.ok()) return status;
  if (draining) set->Drain();
  if (state.queue.size() > 0) set->StartSlowly();
  state.workers[place] = {};
  state.workers[place].set = std::move(set);
  state.places[id] = place;
  state.Change(place);
  state.last_cost = ready.step_cost();
  state.UpdateLargestPool(now);
  state.ReserveIndex();
  state.Dispatch(now);
  return id;
}

void Scheduler::RemoveWorker(WorkerId worker, Time now, Loss loss) {
  State& state = *state_;
  const uint32_t place = state.PlaceOf(worker);
  if (place == kNone) return;
  std::vector<Sequence*> lost, in_step;
  for (const RunningSlot& slot : state.workers[place].set->slots()) {
    if (slot.state != RunningSlot::State::kRunning) continue;
    lost.push_back(slot.sequence);
    if (loss == Loss::kFault && state.workers[place].set->InStep(slot)) in_step.push_back(slot.sequence);
  }
  state.workers[place] = {};
  state.places.erase(worker);
  const std::vector<Sequence*> guilty = state.Guilty(std::move(in_step));
  for (Sequence* sequence : lost) {
    if (std::find(guilty.begin(), guilty.end(), sequence) != guilty.end()) {
      --state.counts.running;
      state.Quarantine(sequence, now);
      continue;
    }
    ++sequence->report.moves;
    state.Return(sequence, now);
  }
  state.UpdateLargestPool(now);
  state.Dispatch(now);
}

void Scheduler::EmptyWorker(WorkerId worker, Time now) {
  State& state = *state_;
  const uint32_t place = state.PlaceOf(worker);
  if (place == kNone) return;
  RunningSet& set = state.Change(place);
  std::vector<Sequence*> moved;
  for (uint32_t id = 0; id < set.slots().size(); ++id) {
    if (set.slots()[id].state != RunningSlot::State::kRunning) continue;
    moved.push_back(set.slots()[id].sequence);
    const std::vector<Sequence*> orphans = set.Stop(id, false);
    moved.insert(moved.end(), orphans.begin(), orphans.end());
  }
  for (Sequence* sequence : moved) {
    ++sequence->report.moves;
    state.Return(sequence, now);
  }
  state.Dispatch(now);
}

std::optional<double> Scheduler::WorkLeft(WorkerId worker) const {
  const uint32_t place = state_->PlaceOf(worker);
  if (place == kNone || !state_->workers[place].set->has_work()) return std::nullopt;
  return state_->workers[place].set->PrefillLeft();
}

void Scheduler::State::ReserveIndex() {
  size_t blocks = 0;
  for (const Worker& worker : workers) blocks += worker.set == nullptr ? 0 : worker.set->pool().size();
  index->Reserve(blocks);
}

// A queued sequence that no worker could ever hold would wait for ever: it fails. Without workers it waits for one.
void Scheduler::State::UpdateLargestPool(Time now) {
  if (places.empty()) return;
  int64_t largest = 0;
  for (const Worker& worker : workers) {
    if (worker.set != nullptr) largest = std::max(largest, worker.set->pool_tokens());
  }
  const bool shrunk = largest < largest_pool;
  largest_pool = largest;
  if (!shrunk) return;
  const std::vector<Sequence*> queued = queue.all();
  for (Sequence* sequence : queued) {
    if (sequence->max_length <= largest) continue;
    Detach(sequence, now);
    FailTooLong(sequence);
  }
}

void Scheduler::State::FailTooLong(Sequence* sequence) {
  Fail(sequence, absl::ResourceExhaustedError(absl::StrCat("prompt and max_tokens: ", sequence->max_length,
                                                           " tokens; the largest pool left holds ", largest_pool)));
}

void Scheduler::DrainWorker(WorkerId worker) {
  const uint32_t place = state_->PlaceOf(worker);
  if (place != kNone) state_->workers[place].set->Drain();
}

uint32_t Scheduler::State::PlaceOf(WorkerId worker) const {
  const auto found = places.find(worker);
  return found == places.end() ? kNone : found->second;
}

std::vector<WorkerId> Scheduler::PendingWorkers() const {
  std::vector<WorkerId> pending;
  for (const State::Worker& worker : state_->workers) {
    if (worker.set != nullptr && worker.set->has_edit()) pending.push_back(worker.set->id());
  }
  return pending;
}

worker::v1::Edit Scheduler::TakeEdit(WorkerId worker) {
  const uint32_t place = state_->PlaceOf(worker);
  MILLRACE_CHECK(place != kNone && state_->workers[place].set->has_edit(), "edits are taken from workers that have one",
                 worker);
  return state_->workers[place].set->TakeEdit();
}

WorkerCounts Scheduler::worker_counts(WorkerId worker) const {
  WorkerCounts counts;
  const uint32_t place = state_->PlaceOf(worker);
  if (place == kNone) return counts;
  const State::Worker& it = state_->workers[place];
  const BlockPool& pool = it.set->pool();
  counts.slots = static_cast<uint32_t>(it.set->slots().size());
  counts.used_slots = it.set->num_used_slots();
  counts.blocks = pool.size();
  counts.free_blocks = pool.free();
  counts.used_blocks = pool.used();
  counts.cached_blocks = pool.cached();
  counts.quarantined_blocks = pool.quarantined();
  counts.steps = it.steps;
  counts.last_step_us = it.last_step_us;
  counts.draining = it.set->draining();
  counts.drafts = it.drafts;
  counts.draft_length = it.set->MeanDraftLength();
  return counts;
}

int64_t Scheduler::max_sequence_tokens() const { return state_->places.empty() ? 0 : state_->largest_pool; }

const worker::v1::Model* Scheduler::model() const { return state_->model.has_value() ? &*state_->model : nullptr; }

}  // namespace millrace
