#include "router/schedule/block_pool.h"

#include "kernels/check.h"

namespace millrace {

BlockPool::BlockPool(uint32_t num_blocks) : blocks_(size_t{num_blocks} + 1) {
  blocks_[num_blocks].prev = blocks_[num_blocks].next = num_blocks;
  for (BlockId block = num_blocks; block-- > 0;) Link(block);
}

void BlockPool::Link(BlockId block) {
  const uint32_t sentinel = size();
  const bool named = blocks_[block].entry != kNone;
  const uint32_t prev = named ? blocks_[sentinel].prev : sentinel;
  const uint32_t next = blocks_[prev].next;
  blocks_[block].prev = prev;
  blocks_[block].next = next;
  blocks_[prev].next = blocks_[next].prev = block;
  ++(named ? cached_ : free_);
}

void BlockPool::Unlink(BlockId block) {
  const Block& it = blocks_[block];
  blocks_[it.prev].next = it.next;
  blocks_[it.next].prev = it.prev;
  --(it.entry != kNone ? cached_ : free_);
}

std::optional<BlockPool::Taken> BlockPool::Take() {
  const BlockId block = blocks_[size()].next;
  if (block == size()) return std::nullopt;
  Unlink(block);
  const EntryId evicted = blocks_[block].entry;
  blocks_[block].entry = kNone;
  blocks_[block].pins = 1;
  return Taken{block, evicted};
}

void BlockPool::Pin(BlockId block) {
  Block& it = blocks_[block];
  MILLRACE_CHECK(it.pins < UINT16_MAX, "a slot pins a block once", block);
  if (it.pins++ > 0) return;
  if (it.quarantines > 0) {
    --quarantined_;
  } else {
    Unlink(block);
  }
}

void BlockPool::Unpin(BlockId block) {
  Block& it = blocks_[block];
  MILLRACE_CHECK(it.pins > 0, "a block is unpinned as often as pinned", block);
  if (--it.pins > 0) return;
  if (it.quarantines > 0) {
    ++quarantined_;
  } else {
    Link(block);
  }
}

void BlockPool::Quarantine(BlockId block) {
  MILLRACE_CHECK(blocks_[block].quarantines < UINT16_MAX, "a slot is released once before its block is reused", block);
  ++blocks_[block].quarantines;
  Unpin(block);
}

void BlockPool::EndQuarantine(BlockId block) {
  Block& it = blocks_[block];
  MILLRACE_CHECK(it.quarantines > 0, "a quarantine ends once", block);
  if (--it.quarantines > 0 || it.pins > 0) return;
  --quarantined_;
  Link(block);
}

void BlockPool::SetEntry(BlockId block, EntryId entry) {
  MILLRACE_CHECK(blocks_[block].pins > 0, "only a pinned block gets or loses a name", block);
  blocks_[block].entry = entry;
}

}  // namespace millrace
