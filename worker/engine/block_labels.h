// What the blocks of the pool hold: of each block that is full of computed tokens, these tokens and the block before
// it. Recorded as sequences are admitted and computed, and told to the next router, so that a cache outlives its
// router. Lives as long as the engine; used by the engine thread. Time: O(blocks) for an admission and for a list, else
// O(1) a block. Bytes: 4 per token of the pool, 40 per block, and the salts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "millrace/worker/v1/worker.pb.h"
#include "worker/engine/engine_limits.h"
#include "worker/engine/slot_table.h"

namespace millrace {

class BlockLabels {
 public:
  static constexpr size_t kMaxListedTokens = 8 << 20;

  explicit BlockLabels(const EngineLimits& limits);

  // `slot` has been given its table: it reads the cached blocks, and will write over the others.
  void Admitted(int32_t slot, const Slot& it);
  // It will write over these as well.
  void Extended(int32_t slot, const google::protobuf::RepeatedField<uint32_t>& blocks);
  // Its first `num_computed` tokens are known, and their k and v are in the cache.
  void Computed(int32_t slot, const Slot& it, int32_t num_computed);
  // The draft model's own k and v of its first `num_computed` tokens, from about the `num_before`-th on, are in the
  // cache too.
  void DraftComputed(const Slot& it, int32_t num_before, int32_t num_computed);
  // Nothing that it computed is to be found again.
  void Forget(const Slot& it);

  // Appends the tokens of its cached blocks. False if they are not known.
  bool AppendCachedTokens(const Slot& it, std::vector<int32_t>* tokens) const;
  // How many of its cached tokens the draft model's own cache has, from the first one on.
  int32_t NumDraftComputed(const Slot& it) const;

  // Every block whose tokens are known back to the first one, each after its parent, the most recently used first; at
  // most kMaxListedTokens.
  std::vector<worker::v1::CachedBlocks> List() const;

 private:
  // Content has a serial number: a child is its parent's only as long as that holds what it held.
  struct Label {
    uint64_t serial = 0;  // 0: not known
    uint64_t parent_serial = 0;
    int32_t parent = -1;  // a block; -1: none
    bool draft_computed = false;
    uint64_t used = 0;  // by which admission, the latest
  };

  Label& at(int32_t block) { return labels_[static_cast<size_t>(block)]; }
  const Label& at(int32_t block) const { return labels_[static_cast<size_t>(block)]; }
  void Overwrite(int32_t slot, int32_t block);
  void Set(int32_t slot, const Slot& it, int32_t index);
  void Add(int32_t block, std::vector<worker::v1::CachedBlocks>* list) const;

  std::vector<Label> labels_;                        // by block
  std::vector<int32_t> tokens_;                      // [block][kBlockTokens]
  absl::flat_hash_map<int32_t, std::string> salts_;  // of first blocks that have one
  std::vector<uint64_t> admissions_;                 // by slot
  uint64_t num_admissions_ = 0;
  uint64_t last_serial_ = 0;
};

}  // namespace millrace
