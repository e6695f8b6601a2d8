#include "router/schedule/prefix_index.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "kernels/check.h"

namespace millrace {
namespace {

constexpr uint32_t kBatch = 8;  // entries fetched from memory at a time

// The bits of `gone` get their depth.
void EndAt(uint32_t depth, size_t word, uint64_t gone, std::vector<uint32_t>& depths) {
  for (; gone != 0; gone &= gone - 1) depths[word * 64 + static_cast<size_t>(std::countr_zero(gone))] = depth;
}

}  // namespace

bool PrefixIndex::Proves(EntryId id, uint64_t hash, Reference parent, const int32_t* tokens) const {
  const Entry& entry = At(id);
  return entry.hash == hash && entry.parent == parent &&
         std::memcmp(TokensOf(id), tokens, block_tokens_ * sizeof(int32_t)) == 0;
}

bool PrefixIndex::Narrow(const Entry& entry, uint32_t depth, Match& match) const {
  uint64_t any = 0;
  for (size_t word = 0; word < match.alive.size(); ++word) {
    uint64_t holds = 0;
    if (entry.many == kNone) {
      if (entry.holder.worker / 64 == word) holds = uint64_t{1} << entry.holder.worker % 64;
    } else if (word < many_[entry.many].workers.size()) {
      holds = many_[entry.many].workers[word];
    }
    EndAt(depth, word, match.alive[word] & ~holds, match.depth);
    match.alive[word] &= holds;
    any |= match.alive[word];
  }
  return any != 0;
}

void PrefixIndex::Find(const PrefixHash& root, absl::Span<const PrefixHash> hashes, const int32_t* tokens,
                       size_t num_workers, Match* match) const {
  match->entries.clear();
  match->depth.assign(num_workers, 0);
  match->alive.assign((num_workers + 63) / 64, ~uint64_t{0});
  if (num_workers % 64 != 0) match->alive.back() = (uint64_t{1} << num_workers % 64) - 1;
  Reference parent = RootReference(root);
  std::array<EntryId, kBatch> ids;
  const auto num_hashes = static_cast<uint32_t>(hashes.size());
  for (uint32_t i = 0; i < std::min(kBatch, num_hashes); ++i) table_.Prefetch(hashes[i].lo);
  for (uint32_t begin = 0; begin < num_hashes; begin += kBatch) {
    const uint32_t end = std::min(begin + kBatch, num_hashes);
    for (uint32_t i = begin; i < end; ++i) {
      const EntryId id = ids[i - begin] = table_.Find(hashes[i].lo, kNone, [](EntryId) { return true; });
      if (id == kNone) break;
      __builtin_prefetch(&At(id));
      __builtin_prefetch(TokensOf(id));
      __builtin_prefetch(TokensOf(id) + 16);
    }
    for (uint32_t i = end; i < std::min(end + kBatch, num_hashes); ++i) table_.Prefetch(hashes[i].lo);
    for (uint32_t i = begin; i < end; ++i) {
      EntryId id = ids[i - begin];
      const int32_t* const own = tokens + size_t{i} * block_tokens_;
      if (id != kNone && !Proves(id, hashes[i].lo, parent, own)) {  // another with nearly the same hash, by chance
        id = table_.Find(hashes[i].lo, kNone, [&](EntryId it) { return Proves(it, hashes[i].lo, parent, own); });
      }
      if (id == kNone) {
        for (size_t word = 0; word < match->alive.size(); ++word) EndAt(i, word, match->alive[word], match->depth);
        return;
      }
      if (!Narrow(At(id), i, *match)) return;
      match->entries.push_back(id);
      parent = {id, At(id).generation};
    }
  }
  for (size_t word = 0; word < match->alive.size(); ++word) EndAt(num_hashes, word, match->alive[word], match->depth);
}

EntryId PrefixIndex::TakePlace() {
  if (unused_.empty()) {
    const auto first = static_cast<EntryId>(chunks_.size() * kChunk);
    if (first + (kChunk - 1) > EntryTable::kMaxId) return kNone;
    chunks_.push_back(
        {std::make_unique<Entry[]>(kChunk), std::unique_ptr<int32_t[]>(new int32_t[size_t{kChunk} * block_tokens_])});
    for (uint32_t i = kChunk; i-- > 0;) unused_.push_back(first + i);
  }
  const EntryId id = unused_.back();
  unused_.pop_back();
  return id;
}

EntryId PrefixIndex::Insert(const PrefixHash& root, EntryId parent, const PrefixHash& hash, const int32_t* tokens,
                            const Holder& holder) {
  MILLRACE_CHECK(holder.worker < kMaxWorkers && (holder.filler < kMaxSlots || holder.filler == kNone),
                 "a holder's numbers fit", holder.worker, holder.filler);
  ++changes_;
  const Reference after = parent == kNone ? RootReference(root) : Reference{parent, At(parent).generation};
  const PackedHolder packed{holder.block, static_cast<uint16_t>(holder.worker),
                            holder.filler == kNone ? kComputed : static_cast<uint16_t>(holder.filler)};
  const EntryId found = table_.Find(hash.lo, kNone, [&](EntryId id) { return At(id).hash == hash.lo; });
  if (found != kNone) {
    if (!Proves(found, hash.lo, after, tokens)) return kNone;
    AddHolder(At(found), packed);
    return found;
  }
  const EntryId id = TakePlace();
  if (id == kNone) return kNone;
  Entry& entry = At(id);
  entry = {hash.lo, after, entry.generation + 1, kNone, packed};
  std::copy_n(tokens, block_tokens_, TokensOf(id));
  table_.Insert(hash.lo, id);
  return id;
}

void PrefixIndex::AddHolder(Entry& entry, PackedHolder holder) {
  if (entry.many == kNone) {
    if (unused_many_.empty()) {
      unused_many_.push_back(static_cast<uint32_t>(many_.size()));
      many_.emplace_back();
    }
    entry.many = unused_many_.back();
    unused_many_.pop_back();
    const PackedHolder first = entry.holder;
    AddHolder(entry, first);
  }
  Many& many = many_[entry.many];
  many.holders.push_back(holder);
  if (many.workers.size() <= holder.worker / 64) many.workers.resize(holder.worker / 64 + 1);
  many.workers[holder.worker / 64] |= uint64_t{1} << holder.worker % 64;
}

PrefixIndex::PackedHolder& PrefixIndex::Find(EntryId entry, uint32_t worker, BlockId block) {
  Entry& it = At(entry);
  for (PackedHolder& holder :
       it.many == kNone ? absl::MakeSpan(&it.holder, 1) : absl::MakeSpan(many_[it.many].holders)) {
    if (holder.worker == worker && holder.block == block) return holder;
  }
  MILLRACE_CHECK(false, "a named block is among its entry's holders", entry, worker, block);
  __builtin_unreachable();
}

void PrefixIndex::Remove(EntryId id, uint32_t worker, BlockId block) {
  ++changes_;
  PackedHolder& holder = Find(id, worker, block);
  Entry& entry = At(id);
  if (entry.many == kNone) {
    table_.Erase(entry.hash, id);
    ++entry.generation;
    unused_.push_back(id);
    return;
  }
  Many& many = many_[entry.many];
  holder = many.holders.back();
  many.holders.pop_back();
  if (std::ranges::none_of(many.holders, [&](const PackedHolder& it) { return it.worker == worker; })) {
    many.workers[worker / 64] &= ~(uint64_t{1} << worker % 64);
  }
  if (many.holders.size() > 1) return;
  entry.holder = many.holders[0];
  many.holders.clear();
  many.workers.clear();
  unused_many_.push_back(entry.many);
  entry.many = kNone;
}

void PrefixIndex::MarkComputed(EntryId entry, uint32_t worker, BlockId block) {
  Find(entry, worker, block).filler = kComputed;
}

PrefixIndex::Holder PrefixIndex::HolderOn(EntryId entry, uint32_t worker) const {
  const Entry& it = At(entry);
  const PackedHolder* found = nullptr;
  for (const PackedHolder& holder :
       it.many == kNone ? absl::MakeSpan(&it.holder, 1) : absl::MakeSpan(many_[it.many].holders)) {
    if (holder.worker != worker || (found != nullptr && holder.filler != kComputed)) continue;
    found = &holder;
    if (holder.filler == kComputed) break;
  }
  MILLRACE_CHECK(found != nullptr, "a matched worker holds the entry", entry, worker);
  return {worker, found->block, found->filler == kComputed ? kNone : found->filler};
}

}  // namespace millrace
