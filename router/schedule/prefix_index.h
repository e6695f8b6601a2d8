// Which block holds which tokens, on which workers. An entry is one block's worth of tokens after one parent entry; its
// holders are blocks of workers, each computed or still being filled by a slot. The hash finds an entry, its tokens and
// its parent prove it. One walk matches all workers. Exact, since the router itself places and evicts every block.
// Lives as long as the router. Time: a match O(blocks * workers / 64), Insert and Remove O(holders); nothing ever
// copies all entries but Reserve. Memory: 46 bytes and the tokens for an entry with one holder, 48 more with two or
// three.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "router/schedule/block_pool.h"
#include "router/schedule/entry_table.h"
#include "router/schedule/prefix_hash.h"

namespace millrace {

class PrefixIndex {
 public:
  static constexpr uint32_t kMaxWorkers = 1 << 16;
  static constexpr uint32_t kMaxSlots = (1 << 16) - 1;

  struct Holder {
    uint32_t worker;  // its place in the scheduler's table, < kMaxWorkers
    BlockId block;
    uint32_t filler;  // the slot that still computes it, < kMaxSlots; kNone: computed
  };

  // The result of a walk; reused to save allocations.
  struct Match {
    std::vector<EntryId> entries;  // by block; as deep as the deepest worker
    std::vector<uint32_t> depth;   // by worker: leading blocks that it holds
    std::vector<uint64_t> alive;   // bit by worker: holds everything so far
  };

  explicit PrefixIndex(uint32_t block_tokens) : block_tokens_(block_tokens) {}

  // Room for the entries of so many blocks, so that no later Insert has to make it.
  void Reserve(size_t num_blocks) { table_.Reserve(num_blocks); }

  // hashes.size() blocks of tokens from `tokens` on.
  void Find(const PrefixHash& root, absl::Span<const PrefixHash> hashes, const int32_t* tokens, size_t num_workers,
            Match* match) const;

  // Makes `holder` one of the holders of `tokens` after `parent` (kNone: first block after `root`). kNone if another
  // prefix has this hash, or there are EntryTable::kMaxId entries: then the block cannot be found.
  EntryId Insert(const PrefixHash& root, EntryId parent, const PrefixHash& hash, const int32_t* tokens,
                 const Holder& holder);
  void Remove(EntryId entry, uint32_t worker, BlockId block);
  void MarkComputed(EntryId entry, uint32_t worker, BlockId block);

  // Counts what was inserted and removed: while it stays, a match stays.
  uint64_t changes() const { return changes_; }

  // Memory is fetched while other work is done: before an Insert with this hash; before a Remove of this entry, in two
  // steps, since the entry says what else is looked at.
  void PrefetchInsert(const PrefixHash& hash) const { table_.Prefetch(hash.lo); }
  void PrefetchEntry(EntryId entry) const { __builtin_prefetch(&At(entry)); }
  void PrefetchRemove(EntryId entry) const { table_.Prefetch(At(entry).hash); }

  // The worker's block for this entry, a computed one if there is any. REQUIRES: the worker holds it.
  Holder HolderOn(EntryId entry, uint32_t worker) const;

  const int32_t* tokens(EntryId entry) const { return TokensOf(entry); }
  size_t size() const { return table_.size(); }

 private:
  static constexpr uint32_t kChunk = 1024;  // entries that are allocated together and never move
  static constexpr uint16_t kComputed = UINT16_MAX;

  struct PackedHolder {
    BlockId block;
    uint16_t worker;
    uint16_t filler;  // kComputed: none
  };
  // A use of an entry's place: a child of a forgotten entry is never taken for a child of the next one there.
  struct Reference {
    EntryId id;
    uint32_t generation;
    friend bool operator==(const Reference&, const Reference&) = default;
  };
  struct Entry {
    uint64_t hash;        // PrefixHash::lo
    Reference parent;     // of a first block: kNone and bits of the root
    uint32_t generation;  // counts the uses of this place
    uint32_t many;        // place in many_, with two holders and more; else kNone
    PackedHolder holder;  // with one
  };
  struct Many {
    absl::InlinedVector<PackedHolder, 3> holders;
    absl::InlinedVector<uint64_t, 1> workers;  // bit by worker
  };
  struct Chunk {
    std::unique_ptr<Entry[]> entries;
    std::unique_ptr<int32_t[]> tokens;  // [entry][block_tokens]
  };

  static Reference RootReference(const PrefixHash& root) { return {kNone, static_cast<uint32_t>(root.hi)}; }
  Entry& At(EntryId id) { return chunks_[id / kChunk].entries[id % kChunk]; }
  const Entry& At(EntryId id) const { return chunks_[id / kChunk].entries[id % kChunk]; }
  int32_t* TokensOf(EntryId id) const { return &chunks_[id / kChunk].tokens[size_t{id % kChunk} * block_tokens_]; }
  bool Proves(EntryId id, uint64_t hash, Reference parent, const int32_t* tokens) const;
  PackedHolder& Find(EntryId entry, uint32_t worker, BlockId block);
  EntryId TakePlace();
  void AddHolder(Entry& entry, PackedHolder holder);
  // Keeps alive who holds the entry too; the others' depth is `depth`. Returns whether anyone is left.
  bool Narrow(const Entry& entry, uint32_t depth, Match& match) const;

  const uint32_t block_tokens_;
  EntryTable table_;
  std::vector<Chunk> chunks_;
  std::vector<EntryId> unused_;
  std::vector<Many> many_;
  std::vector<uint32_t> unused_many_;
  uint64_t changes_ = 0;
};

}  // namespace millrace
