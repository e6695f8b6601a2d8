// Which block holds which tokens, on which workers. An entry is one block's worth of tokens after one parent entry; its
// holders are blocks of workers, each computed or still being filled by a slot. The hash finds an entry, its tokens and
// its parent prove it. One walk matches all workers. Exact, since the router itself places and evicts every block.
// Lives as long as the router. Time: a match O(blocks * holders), Insert and Remove O(holders). Memory: 80 + 4 *
// block_tokens bytes per entry, 12 per holder.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "router/schedule/block_pool.h"
#include "router/schedule/prefix_hash.h"

namespace millrace {

class PrefixIndex {
 public:
  struct Holder {
    uint32_t worker;  // its place in the scheduler's table
    BlockId block;
    uint32_t filler;  // the slot that still computes it; kNone: computed
  };

  // The result of a walk; reused to save allocations.
  struct Match {
    std::vector<EntryId> entries;  // by block; as deep as the deepest worker
    std::vector<uint32_t> depth;   // by worker: leading blocks that it holds
  };

  explicit PrefixIndex(uint32_t block_tokens) : block_tokens_(block_tokens) {}

  // hashes.size() blocks of tokens from `tokens` on.
  void Find(const PrefixHash& root, absl::Span<const PrefixHash> hashes, const int32_t* tokens, size_t num_workers,
            Match* match) const;

  // Makes `holder` one of the holders of `tokens` after `parent` (kNone: first block after `root`). kNone if another
  // prefix has this hash: then the block cannot be found.
  EntryId Insert(const PrefixHash& root, EntryId parent, const PrefixHash& hash, const int32_t* tokens,
                 const Holder& holder);
  void Remove(EntryId entry, uint32_t worker, BlockId block);
  void MarkComputed(EntryId entry, uint32_t worker, BlockId block);

  // The worker's block for this entry, a computed one if there is any. REQUIRES: the worker holds it.
  const Holder& HolderOn(EntryId entry, uint32_t worker) const;

  const int32_t* tokens(EntryId entry) const { return tokens_.data() + size_t{entry} * block_tokens_; }
  size_t size() const { return by_hash_.size(); }

 private:
  struct Entry {
    PrefixHash hash;
    uint64_t serial = 0;  // never reused, so a child of a forgotten entry is never taken for another's
    uint64_t parent = 0;  // its serial
    absl::InlinedVector<Holder, 2> holders;
  };
  struct HashOf {
    size_t operator()(const PrefixHash& hash) const { return hash.lo; }
  };

  static uint64_t RootSerial(const PrefixHash& root) { return root.hi | uint64_t{1} << 63; }
  bool Proves(const Entry& entry, EntryId id, uint64_t parent, const int32_t* tokens) const;
  Holder& Find(EntryId entry, uint32_t worker, BlockId block);

  const uint32_t block_tokens_;
  std::vector<Entry> entries_;
  std::vector<int32_t> tokens_;  // [entry][block_tokens]
  std::vector<EntryId> unused_;
  absl::flat_hash_map<PrefixHash, EntryId, HashOf> by_hash_;
  uint64_t next_serial_ = 1;
};

}  // namespace millrace
