// Blocks of a running set: leases, names in the prefix index, and who yields when there are none left.
#include <algorithm>
#include <tuple>

#include "absl/container/inlined_vector.h"
#include "kernels/check.h"
#include "router/schedule/running_set.h"

namespace millrace {
namespace {

constexpr uint32_t kBlocksAtOnce = 16;  // fetched from memory

}  // namespace

// The tokens it has, and the lease beyond; never more than its longest length needs.
uint32_t RunningSet::TargetBlocks(const Sequence& sequence) const {
  const uint32_t tokens = std::min(sequence.length() + lease_tokens_ahead_, sequence.max_length);
  return tokens / block_tokens_ + (tokens % block_tokens_ != 0 ? 1 : 0);
}

// Blocks that admissions leave to those who run: 1 %, or half a lease each. Nothing if nobody runs, so that a lone
// sequence fits.
uint32_t RunningSet::Reserve() const {
  const uint64_t leases = uint64_t{num_used_slots_} * lease_tokens_ahead_ / 2 / block_tokens_;
  return num_used_slots_ == 0 ? 0 : std::max(pool_.size() / 100, static_cast<uint32_t>(leases));
}

// Several at a time, because what they held is cold: it is fetched from memory while the next ones are taken.
void RunningSet::TakeBlocks(uint32_t num_blocks, std::vector<BlockId>* table) {
  absl::InlinedVector<BlockPool::Taken, kBlocksAtOnce> named;
  while (num_blocks > 0) {
    named.clear();
    for (uint32_t n = std::min(num_blocks, kBlocksAtOnce); n > 0; --n, --num_blocks) {
      const std::optional<BlockPool::Taken> taken = pool_.Take();
      MILLRACE_CHECK(taken.has_value(), "blocks are taken only when there are some");
      table->push_back(taken->block);
      if (taken->evicted == kNone) continue;
      index_->PrefetchEntry(taken->evicted);
      named.push_back(*taken);
    }
    for (const BlockPool::Taken& taken : named) index_->PrefetchRemove(taken.evicted);
    for (const BlockPool::Taken& taken : named) index_->Remove(taken.evicted, place_, taken.block);
  }
}

// Names what is named at once: the leading blocks that are full of known tokens, if `filler` is to compute them.
void RunningSet::NameAll(RunningSlot* slot, uint32_t filler) {
  const std::vector<PrefixHash>& hashes = slot->sequence->hashes;
  for (size_t i = slot->num_named; i < std::min<size_t>(slot->num_named + kBlocksAtOnce, hashes.size()); ++i) {
    index_->PrefetchInsert(hashes[i]);
  }
  while ((slot->num_named + 1) * block_tokens_ <= slot->sequence->length()) {
    if (slot->num_named + kBlocksAtOnce < hashes.size())
      index_->PrefetchInsert(hashes[slot->num_named + kBlocksAtOnce]);
    if (!Name(slot, filler)) return;
  }
}

bool RunningSet::Grow(RunningSlot* slot, uint32_t num_blocks) {
  const size_t before = slot->table.size();
  if (before < num_blocks) {
    TakeBlocks(std::min(num_blocks - static_cast<uint32_t>(before), pool_.available()), &slot->table);
  }
  const uint32_t id = IdOf(*slot);
  if (slot->table.size() > before && Told(*slot) && slot->num_told == before) extend_.push_back(id);
  return slot->table.size() >= num_blocks;
}

// Names the first nameless block, full of known tokens, after the named ones before it.
bool RunningSet::Name(RunningSlot* slot, uint32_t filler) {
  Sequence& sequence = *slot->sequence;
  const uint32_t i = slot->num_named;
  const EntryId parent = i == 0 ? kNone : pool_.entry(slot->table[i - 1]);
  if (i > 0 && parent == kNone) return false;
  hasher_->Extend(sequence.hashes, sequence.root, sequence.tokens, block_tokens_);
  const EntryId entry =
      index_->Insert(sequence.root, parent, sequence.hashes[i], sequence.tokens.data() + size_t{i} * block_tokens_,
                     {place_, slot->table[i], filler});
  if (entry == kNone) return false;
  pool_.SetEntry(slot->table[i], entry);
  ++slot->num_named;
  return true;
}

void RunningSet::Unname(BlockId block) {
  index_->Remove(pool_.entry(block), place_, block);
  pool_.SetEntry(block, kNone);
}

bool RunningSet::FreesBlocks(const RunningSlot& slot) const {
  return std::any_of(slot.table.rbegin(), slot.table.rend(), [&](BlockId block) { return pool_.pins(block) == 1; });
}

// A paused sequence that frees a block, else the lowest priority, most recently admitted one, `needy` itself included.
// Those that were preempted often enough yield only to the oldest sequence, latest first, and only when nobody else
// can: so the oldest of those that are not paused always goes on.
RunningSlot* RunningSet::ChooseVictim(const RunningSlot& needy) {
  RunningSlot* victim = nullptr;
  RunningSlot* last_resort = nullptr;
  bool oldest = true;
  for (RunningSlot& slot : slots_) {
    if (slot.state != RunningSlot::State::kRunning) continue;
    const Sequence& sequence = *slot.sequence;
    if (sequence.id < needy.sequence->id && !sequence.paused()) oldest = false;
    if (!FreesBlocks(slot)) continue;
    if (sequence.report.preemptions >= max_preemptions_ && !sequence.paused()) {
      if (&slot != &needy && (last_resort == nullptr || sequence.id > last_resort->sequence->id)) last_resort = &slot;
      continue;
    }
    const auto yields = [](const RunningSlot& it) {
      return std::make_tuple(it.sequence->paused(), -it.sequence->priority, it.admission);
    };
    if (victim == nullptr || yields(slot) > yields(*victim)) victim = &slot;
  }
  return victim != nullptr ? victim : oldest ? last_resort : nullptr;
}

void RunningSet::PauseChanged(uint32_t slot) {
  if (slots_[slot].sequence->paused()) {
    std::erase(hungry_, slot);
  } else {
    touched_.push_back(slot);
  }
}

RunningSet::Evicted RunningSet::GrowLeases() {
  std::erase_if(touched_, [&](uint32_t id) { return slots_[id].sequence->paused(); });
  const auto older = [&](uint32_t a, uint32_t b) { return slots_[a].sequence->id < slots_[b].sequence->id; };
  for (const uint32_t id : touched_) {
    if (OutOfRoom(slots_[id]) && std::find(hungry_.begin(), hungry_.end(), id) == hungry_.end()) hungry_.push_back(id);
  }
  std::sort(hungry_.begin(), hungry_.end(), older);
  Evicted evicted;
  for (;;) {
    std::erase_if(hungry_, [&](uint32_t id) {
      const uint32_t needed = (slots_[id].sequence->length() + block_tokens_ - 1) / block_tokens_;
      if (!Grow(&slots_[id], needed)) return false;
      touched_.push_back(id);
      return true;
    });
    if (hungry_.size() <= pool_.quarantined()) break;  // enough is on its way
    RunningSlot* const victim = ChooseVictim(slots_[hungry_.front()]);
    if (victim == nullptr) break;
    evicted.preempted.push_back(victim->sequence);
    const uint32_t used = pool_.used();
    for (Sequence* orphan : Stop(IdOf(*victim), false)) evicted.orphans.push_back(orphan);
    MILLRACE_CHECK(pool_.used() < used, "a preemption frees blocks", used);
  }
  for (const uint32_t id : touched_) {
    RunningSlot& slot = slots_[id];
    if (slot.table.size() < TargetBlocks(*slot.sequence)) Grow(&slot, TargetBlocks(*slot.sequence));
  }
  touched_.clear();
  return evicted;
}

}  // namespace millrace
