#include "router/schedule/running_set.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace millrace {
namespace {

void AddOnce(std::vector<uint32_t>* slots, uint32_t slot) {
  if (std::find(slots->begin(), slots->end(), slot) == slots->end()) slots->push_back(slot);
}

}  // namespace

RunningSet::RunningSet(WorkerId id, uint32_t place, const worker::v1::Ready& ready, const SchedulerOptions& options,
                       const PrefixHasher* hasher, PrefixIndex* index)
    : id_(id),
      place_(place),
      step_target_(std::max(ready.step_target_us(), 1u) * 1e-6),
      block_tokens_(ready.block_tokens()),
      lease_tokens_ahead_(static_cast<uint32_t>(std::clamp(options.lease_tokens_ahead, 0, 1 << 16))),
      max_prefill_ahead_(static_cast<double>(options.max_prefill_ahead) * 1e-6),
      max_preemptions_(options.max_preemptions),
      hasher_(hasher),
      index_(index),
      fit_(ready.step_cost()),
      policy_(ready, options.speculation),
      pool_(ready.num_blocks()),
      slots_(ready.num_slots()) {
  for (uint32_t slot = ready.num_slots(); slot-- > 0;) free_slots_.push_back(slot);
}

RunningSet::~RunningSet() {
  for (BlockId block = 0; block < pool_.size(); ++block) {
    if (pool_.entry(block) != kNone) index_->Remove(pool_.entry(block), place_, block);
  }
}

uint32_t RunningSet::UsableBlocks(const Sequence& sequence, uint32_t depth) const {
  return sequence.wants_prompt_logprobs() ? 0 : std::min(depth, (sequence.length() - 1) / block_tokens_);
}

WorkerLoad RunningSet::Load(int64_t rank, double output) const {
  WorkerLoad load{&cost(),
                  step_target_,
                  static_cast<double>(decode_rows_),
                  static_cast<double>(decode_context_),
                  static_cast<double>(prefills_.size()),
                  0,
                  output};
  for (const uint32_t slot : prefills_) {
    if (slots_[slot].rank > rank) break;
    load.wait += slots_[slot].left;
  }
  if (slow_start_ > 0 && !prefills_.empty()) load.wait += max_prefill_ahead_ * slow_start_ / kSlowStart;
  return load;
}

double RunningSet::PrefillLeft() const {
  double left = 0;
  for (const uint32_t slot : prefills_) left += slots_[slot].left;
  return left;
}

bool RunningSet::Admit(Sequence* sequence, const PrefixIndex::Match& match, Time now) {
  uint32_t hits = UsableBlocks(*sequence, match.depth[place_]);
  std::vector<BlockId> table;
  table.reserve(TargetBlocks(*sequence));
  uint32_t filler = kNone;
  uint32_t filled = 0;  // blocks up to the last one in flight
  for (uint32_t i = 0; i < hits; ++i) {
    const PrefixIndex::Holder holder = index_->HolderOn(match.entries[i], place_);
    table.push_back(holder.block);
    if (holder.filler == kNone) continue;
    filler = holder.filler;
    filled = i + 1;
  }
  if (filler != kNone) {
    // The filler's own table holds the same tokens up to there, and whatever it waits for is computed before it starts.
    table.assign(slots_[filler].table.begin(), slots_[filler].table.begin() + filled);
    hits = filled;
  }
  const auto unused = std::count_if(table.begin(), table.end(), [&](BlockId block) { return pool_.unused(block); });
  const uint32_t missing = TargetBlocks(*sequence) - hits;
  if (pool_.available() < uint64_t{missing} + static_cast<uint64_t>(unused) + Reserve()) return false;

  for (const BlockId block : table) pool_.Pin(block);
  TakeBlocks(missing, &table);
  const uint32_t id = free_slots_.back();
  free_slots_.pop_back();
  ++num_used_slots_;
  RunningSlot& slot = slots_[id];
  slot = RunningSlot{};
  slot.state = RunningSlot::State::kRunning;
  slot.sequence = sequence;
  slot.admit_edit = last_edit_ + 1;
  slot.admission = ++num_admissions_;
  slot.table = std::move(table);
  slot.num_cached = slot.num_named = slot.num_ready = hits;
  slot.num_computed = hits * block_tokens_;
  slot.filler = filler;
  if (filler != kNone) slots_[filler].dependents.push_back(id);
  NameAll(&slot, id);
  slot.prefilling = true;
  slot.left = PrefillSeconds(cost(), slot.num_computed, sequence->length() - slot.num_computed);
  slot.rank = slot.told_rank = PrefillRank(*sequence, slot.left, now);
  const auto after = std::upper_bound(prefills_.begin(), prefills_.end(), slot.rank,
                                      [&](int64_t rank, uint32_t other) { return rank < slots_[other].rank; });
  prefills_.insert(after, id);
  admit_.push_back(id);
  sequence->worker = place_;
  sequence->slot = id;
  return true;
}

void RunningSet::RefreshRanks(Time now) {
  for (const uint32_t id : prefills_) slots_[id].rank = PrefillRank(*slots_[id].sequence, slots_[id].left, now);
  const auto by_rank = [&](uint32_t a, uint32_t b) { return slots_[a].rank < slots_[b].rank; };
  if (!std::is_sorted(prefills_.begin(), prefills_.end(), by_rank)) {
    std::stable_sort(prefills_.begin(), prefills_.end(), by_rank);
  }
  const auto by_told_rank = [&](uint32_t a, uint32_t b) { return slots_[a].told_rank < slots_[b].told_rank; };
  if (std::is_sorted(prefills_.begin(), prefills_.end(), by_told_rank)) return;
  for (const uint32_t id : prefills_) {
    slots_[id].told_rank = slots_[id].rank;
    if (Told(slots_[id])) AddOnce(&rank_, id);
  }
}

absl::StatusOr<RunningSlot*> RunningSet::ReportedSlot(uint32_t id, uint64_t applied_edit) {
  if (id >= slots_.size()) return absl::InvalidArgumentError(absl::StrCat("slot ", id, " of ", slots_.size()));
  RunningSlot& slot = slots_[id];
  if (slot.state == RunningSlot::State::kReleasing) return nullptr;
  if (slot.state == RunningSlot::State::kEmpty || slot.admit_edit > applied_edit) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", id, " is empty as of edit ", applied_edit));
  }
  return &slot;
}

absl::Status RunningSet::Applied(uint64_t edit) {
  if (edit < applied_edit_ || edit > last_edit_) {
    return absl::InvalidArgumentError(
        absl::StrCat("applied_edit ", edit, " is not within ", applied_edit_, " … ", last_edit_));
  }
  applied_edit_ = edit;
  for (; !quarantine_.empty() && quarantine_.front().edit <= edit; quarantine_.pop_front()) {
    const Quarantined& gone = quarantine_.front();
    for (const BlockId block : gone.blocks) pool_.EndQuarantine(block);
    slots_[gone.slot] = RunningSlot{};
    free_slots_.push_back(gone.slot);
  }
  return absl::OkStatus();
}

void RunningSet::Computed(RunningSlot* slot, uint32_t num_computed) {
  slot->num_computed = num_computed;
  for (; (slot->num_ready + 1) * block_tokens_ <= num_computed; ++slot->num_ready) {
    if (slot->num_ready < slot->num_named) {
      index_->MarkComputed(pool_.entry(slot->table[slot->num_ready]), place_, slot->table[slot->num_ready]);
    } else if (slot->num_ready == slot->num_named) {
      Name(slot, kNone);
    }
  }
  const uint32_t id = IdOf(*slot);
  std::erase_if(slot->dependents, [&](uint32_t other) {
    RunningSlot& dependent = slots_[other];
    if (dependent.state != RunningSlot::State::kRunning || dependent.filler != id) return true;
    if (dependent.num_cached * block_tokens_ > num_computed) return false;
    dependent.filler = kNone;
    return true;
  });
  if (slot->prefilling) {
    slot->left = PrefillSeconds(cost(), num_computed, slot->sequence->length() - num_computed);
  }
}

void RunningSet::Appended(RunningSlot* slot, uint32_t num_tokens) {
  const uint32_t length = slot->sequence->length();
  if (slot->prefilling) {
    slot->left = 0;
    if (slow_start_ > 0) --slow_start_;
    LeavePrefill(slot);
    ++decode_rows_;
    decode_context_ += length;
  } else {
    decode_context_ += num_tokens;
  }
  Computed(slot, length - 1);
  touched_.push_back(IdOf(*slot));
}

void RunningSet::Stalled(RunningSlot* slot) { touched_.push_back(IdOf(*slot)); }

void RunningSet::LeavePrefill(RunningSlot* slot) {
  slot->prefilling = false;
  std::erase(prefills_, IdOf(*slot));
  std::erase(rank_, IdOf(*slot));
}

std::vector<Sequence*> RunningSet::Stop(uint32_t slot, bool emptied, bool poisoned) {
  std::vector<Sequence*> orphans;
  std::vector<uint32_t> dependents;
  StopOne(&slots_[slot], emptied, poisoned, &dependents);
  while (!dependents.empty()) {
    RunningSlot& dependent = slots_[dependents.back()];
    dependents.pop_back();
    orphans.push_back(dependent.sequence);
    StopOne(&dependent, false, false, &dependents);
  }
  return orphans;
}

void RunningSet::StopOne(RunningSlot* slot, bool emptied, bool poisoned, std::vector<uint32_t>* dependents) {
  const uint32_t id = IdOf(*slot);
  MILLRACE_CHECK(slot->state == RunningSlot::State::kRunning, "a slot is stopped once", id);
  for (uint32_t i = slot->num_named; i-- > (poisoned ? slot->num_cached : slot->num_ready);) Unname(slot->table[i]);
  for (const uint32_t other : slot->dependents) {
    RunningSlot& dependent = slots_[other];
    if (dependent.state != RunningSlot::State::kRunning || dependent.filler != id) continue;
    dependent.filler = kNone;
    dependents->push_back(other);
  }
  if (slot->prefilling) {
    LeavePrefill(slot);
  } else {
    --decode_rows_;
    decode_context_ -= slot->sequence->length();
  }
  std::erase(touched_, id);
  std::erase(hungry_, id);
  std::erase(extend_, id);
  std::erase(admit_, id);
  std::erase(draft_, id);
  drafted_ahead_ -= slot->draft.length;
  --num_used_slots_;
  std::reverse(slot->table.begin(), slot->table.end());
  if (emptied || !Told(*slot)) {
    for (const BlockId block : slot->table) pool_.Unpin(block);
    *slot = RunningSlot{};
    free_slots_.push_back(id);
  } else {
    for (const BlockId block : slot->table) pool_.Quarantine(block);
    quarantine_.push_back({last_edit_ + 1, id, std::move(slot->table)});
    *slot = RunningSlot{};
    slot->state = RunningSlot::State::kReleasing;
    release_.push_back(id);
  }
}

worker::v1::Edit RunningSet::TakeEdit() {
  worker::v1::Edit edit;
  edit.set_edit_id(++last_edit_);
  edit.mutable_release()->Add(release_.begin(), release_.end());
  for (const uint32_t id : admit_) {
    FillEdit(slots_[id], edit.add_admit());
    slots_[id].num_told = static_cast<uint32_t>(slots_[id].table.size());
  }
  for (const uint32_t id : extend_) {
    RunningSlot& slot = slots_[id];
    worker::v1::Extend* extend = edit.add_extend();
    extend->set_slot(id);
    extend->mutable_block_table()->Add(slot.table.begin() + slot.num_told, slot.table.end());
    slot.num_told = static_cast<uint32_t>(slot.table.size());
  }
  for (const uint32_t id : rank_) {
    worker::v1::Rank* rank = edit.add_rank();
    rank->set_slot(id);
    rank->set_rank(slots_[id].told_rank);
  }
  for (const uint32_t id : draft_) {
    RunningSlot& slot = slots_[id];
    slot.told_draft = slot.draft;
    slot.draft_edit = last_edit_;
    worker::v1::Draft* draft = edit.add_draft();
    draft->set_slot(id);
    draft->set_method(slot.draft.method);
    draft->set_length(slot.draft.length);
  }
  for (auto* list : {&release_, &admit_, &extend_, &rank_, &draft_}) list->clear();
  return edit;
}

void RunningSet::FillEdit(const RunningSlot& slot, worker::v1::Admit* admit) const {
  const Sequence& sequence = *slot.sequence;
  const auto first_new = sequence.tokens.begin() + slot.num_cached * block_tokens_;
  admit->set_slot(IdOf(slot));
  admit->set_rank(slot.told_rank);
  admit->set_num_cached_tokens(slot.num_cached * block_tokens_);
  admit->mutable_token_ids()->Add(first_new, sequence.tokens.end());
  if (sequence.has_penalty()) admit->mutable_cached_token_ids()->Add(sequence.tokens.begin(), first_new);
  admit->mutable_block_table()->Add(slot.table.begin(), slot.table.end());
  if (slot.filler != kNone) admit->set_filling_slot(slot.filler);
  admit->set_num_prompt_tokens(sequence.num_prompt);
  admit->set_min_length(sequence.min_length);
  admit->set_max_length(sequence.max_length);
  admit->mutable_stop_token_ids()->Add(sequence.stop_token_ids.begin(), sequence.stop_token_ids.end());
  admit->set_cache_salt(sequence.cache_salt);
  admit->set_traceparent(sequence.traceparent);
  *admit->mutable_sampling() = sequence.sampling;
  if (!sequence.wants_prompt_logprobs()) admit->mutable_sampling()->clear_prompt_logprobs();
}

}  // namespace millrace
