#include "router/schedule/entry_table.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace millrace {
namespace {

// At most 3 of 5 slots are taken: a search for what is not there looks at 4 of them, where 4 of 5 would make it 13.
size_t SlotsFor(size_t entries) { return entries + entries * 2 / 3 + 8; }

}  // namespace

void EntryTable::Reserve(size_t entries) {
  if (SlotsFor(entries) > slots_.size()) Grow(SlotsFor(entries));
}

void EntryTable::Grow(size_t num_slots) {
  const std::vector<uint64_t> before = std::exchange(slots_, std::vector<uint64_t>(num_slots));
  for (const uint64_t slot : before) {
    if (slot == 0) continue;
    size_t i = Home(slot >> kIdBits);
    while (slots_[i] != 0) i = Next(i);
    slots_[i] = slot;
  }
}

void EntryTable::Insert(uint64_t hash, uint32_t id) {
  MILLRACE_CHECK(id <= kMaxId, "ids fit their slots", id);
  if (SlotsFor(++size_) > slots_.size()) Grow(2 * SlotsFor(size_));
  size_t i = Home(hash >> kIdBits);
  while (slots_[i] != 0) i = Next(i);
  slots_[i] = (hash & ~kIdMask) | (id + 1);
}

// Slots after a gap move back into it, unless that would take them before their home.
void EntryTable::Erase(uint64_t hash, uint32_t id) {
  const uint64_t wanted = (hash & ~kIdMask) | (id + 1);
  size_t gap = Home(hash >> kIdBits);
  for (; slots_[gap] != wanted; gap = Next(gap)) MILLRACE_CHECK(slots_[gap] != 0, "what is erased was inserted", id);
  for (size_t i = Next(gap); slots_[i] != 0; i = Next(i)) {
    const size_t home = Home(slots_[i] >> kIdBits);
    const bool home_within = gap < i ? gap < home && home <= i : gap < home || home <= i;
    if (home_within) continue;
    slots_[gap] = slots_[i];
    gap = i;
  }
  slots_[gap] = 0;
  --size_;
}

}  // namespace millrace
