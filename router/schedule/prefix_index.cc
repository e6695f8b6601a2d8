#include "router/schedule/prefix_index.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/check.h"

namespace millrace {
namespace {

constexpr uint32_t kBatch = 8;  // entries fetched from memory at a time

}  // namespace

bool PrefixIndex::Proves(const Entry& entry, EntryId id, uint64_t parent, const int32_t* tokens) const {
  return entry.parent == parent && std::memcmp(this->tokens(id), tokens, block_tokens_ * sizeof(int32_t)) == 0;
}

void PrefixIndex::Find(const PrefixHash& root, absl::Span<const PrefixHash> hashes, const int32_t* tokens,
                       size_t num_workers, Match* match) const {
  match->entries.clear();
  match->depth.assign(num_workers, 0);
  uint64_t parent = RootSerial(root);
  std::array<EntryId, kBatch> ids;
  for (uint32_t begin = 0; begin < hashes.size(); begin += kBatch) {
    const size_t end = std::min<size_t>(begin + kBatch, hashes.size());
    for (size_t i = begin; i < end; ++i) {
      const auto found = by_hash_.find(hashes[i]);
      const EntryId id = ids[i - begin] = found == by_hash_.end() ? kNone : found->second;
      if (id == kNone) break;
      __builtin_prefetch(&entries_[id]);
      __builtin_prefetch(this->tokens(id));
    }
    for (size_t i = end; i < std::min<size_t>(end + kBatch, hashes.size()); ++i) by_hash_.prefetch(hashes[i]);
    for (uint32_t i = begin; i < end; ++i) {
      const EntryId id = ids[i - begin];
      if (id == kNone) return;
      const Entry& entry = entries_[id];
      if (!Proves(entry, id, parent, tokens + size_t{i} * block_tokens_)) return;
      bool any = false;
      for (const Holder& holder : entry.holders) {
        uint32_t& depth = match->depth[holder.worker];
        if (depth == i) depth = i + 1;
        any |= depth == i + 1;
      }
      if (!any) return;
      match->entries.push_back(id);
      parent = entry.serial;
    }
  }
}

EntryId PrefixIndex::Insert(const PrefixHash& root, EntryId parent, const PrefixHash& hash, const int32_t* tokens,
                            const Holder& holder) {
  const uint64_t parent_serial = parent == kNone ? RootSerial(root) : entries_[parent].serial;
  const auto [found, is_new] = by_hash_.try_emplace(hash, kNone);
  if (is_new) {
    if (unused_.empty()) {
      unused_.push_back(static_cast<EntryId>(entries_.size()));
      entries_.emplace_back();
      tokens_.resize(entries_.size() * block_tokens_);
    }
    const EntryId id = found->second = unused_.back();
    unused_.pop_back();
    Entry& entry = entries_[id];
    entry.hash = hash;
    entry.serial = next_serial_++;
    entry.parent = parent_serial;
    std::copy_n(tokens, block_tokens_, tokens_.begin() + static_cast<ptrdiff_t>(size_t{id} * block_tokens_));
  } else if (!Proves(entries_[found->second], found->second, parent_serial, tokens)) {
    return kNone;
  }
  entries_[found->second].holders.push_back(holder);
  return found->second;
}

PrefixIndex::Holder& PrefixIndex::Find(EntryId entry, uint32_t worker, BlockId block) {
  auto& holders = entries_[entry].holders;
  const auto found = std::find_if(holders.begin(), holders.end(), [&](const Holder& holder) {
    return holder.worker == worker && holder.block == block;
  });
  MILLRACE_CHECK(found != holders.end(), "a named block is among its entry's holders", entry, worker, block);
  return *found;
}

void PrefixIndex::Remove(EntryId entry, uint32_t worker, BlockId block) {
  Holder& holder = Find(entry, worker, block);
  auto& holders = entries_[entry].holders;
  holder = holders.back();
  holders.pop_back();
  if (!holders.empty()) return;
  by_hash_.erase(entries_[entry].hash);
  entries_[entry].serial = 0;
  unused_.push_back(entry);
}

void PrefixIndex::MarkComputed(EntryId entry, uint32_t worker, BlockId block) {
  Find(entry, worker, block).filler = kNone;
}

const PrefixIndex::Holder& PrefixIndex::HolderOn(EntryId entry, uint32_t worker) const {
  const Holder* found = nullptr;
  for (const Holder& holder : entries_[entry].holders) {
    if (holder.worker != worker) continue;
    if (holder.filler == kNone) return holder;
    if (found == nullptr) found = &holder;
  }
  MILLRACE_CHECK(found != nullptr, "a matched worker holds the entry", entry, worker);
  return *found;
}

}  // namespace millrace
