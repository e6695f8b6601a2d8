// The blocks of one worker: who pins them, which are free, and in which order the unpinned are reused. A freed block
// keeps its content and its place in the prefix index until it is taken again, so the free list is the prefix cache:
// named blocks leave it least recently used first, nameless ones before all others. Lives as long as the worker's
// stream. Time: O(1) for each call. Memory: 16 bytes per block.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace millrace {

using BlockId = uint32_t;
using EntryId = uint32_t;  // of the prefix index
inline constexpr uint32_t kNone = UINT32_MAX;

class BlockPool {
 public:
  explicit BlockPool(uint32_t num_blocks);

  // Pins the block that has been unpinned for longest. The prefix index must forget `evicted`, unless it is kNone.
  struct Taken {
    BlockId block;
    EntryId evicted;
  };
  std::optional<Taken> Take();

  void Pin(BlockId block);
  void Unpin(BlockId block);  // of a sequence: last block first, so that children are reused before parents

  // One pin becomes a quarantine: a released slot may still write there, so the block is not reused before
  // EndQuarantine. It may be pinned meanwhile by those who only read it.
  void Quarantine(BlockId block);
  void EndQuarantine(BlockId block);

  // What the block holds. REQUIRES: pinned.
  void SetEntry(BlockId block, EntryId entry);
  EntryId entry(BlockId block) const { return blocks_[block].entry; }

  uint32_t pins(BlockId block) const { return blocks_[block].pins; }
  bool unused(BlockId block) const { return blocks_[block].pins == 0 && blocks_[block].quarantines == 0; }

  uint32_t size() const { return static_cast<uint32_t>(blocks_.size()) - 1; }
  uint32_t available() const { return free_ + cached_; }  // what Take can give
  uint32_t free() const { return free_; }
  uint32_t cached() const { return cached_; }
  uint32_t quarantined() const { return quarantined_; }
  uint32_t used() const { return size() - free_ - cached_ - quarantined_; }

 private:
  struct Block {
    uint32_t prev = kNone;
    uint32_t next = kNone;
    EntryId entry = kNone;
    uint16_t pins = 0;  // at most one a slot, as quarantines
    uint16_t quarantines = 0;
  };

  void Link(BlockId block);
  void Unlink(BlockId block);

  std::vector<Block> blocks_;  // and, last, the list's sentinel
  uint32_t free_ = 0;
  uint32_t cached_ = 0;
  uint32_t quarantined_ = 0;
};

}  // namespace millrace
