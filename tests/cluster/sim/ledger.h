// What the judge's protocol says of one worker's blocks, kept beside the Scheduler to translate between the two. The
// Scheduler's blocks have numbers; the trace's have names, which tell what they hold. The trace also counts and shares
// a prompt's last block when it is not full; the Scheduler does not, so such a tail is there only while a request runs
// with it. Lives until the worker leaves; single-threaded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "router/schedule/scheduler.h"

namespace millrace {

inline constexpr uint32_t kTraceBlock = 512;  // tokens
using BlockName = int32_t;                    // numbered as they come
inline constexpr BlockName kNameless = -1;

struct TraceRequest {
  int64_t id = 0;
  std::vector<BlockName> blocks;  // of the prompt
  uint32_t tokens = 0;            // of the prompt
  uint32_t length = 0;            // tokens of prompt and output that the judge has
  uint32_t fed = 0;               // … and the Scheduler
  SequenceId sequence = 0;

  // While the Scheduler runs it:
  bool running = false;
  bool told = false;  // the judge has got the admission
  bool decoding = false;
  size_t worker = 0;
  uint32_t slot = 0;
  uint32_t cached = 0;    // leading blocks that the Scheduler found
  uint32_t computed = 0;  // tokens, as reported to the Scheduler
  uint32_t lease = 0;     // blocks that the Scheduler gave

  uint32_t full_blocks() const;  // of the prompt
  // Of those, what the Scheduler may share: at least one token is left to compute.
  uint32_t shareable_blocks() const { return std::min(full_blocks(), (length - 1) / kTraceBlock); }
  uint32_t nameless_blocks() const;  // that the judge adds to the prompt's at its admission
};

class Ledger {
 public:
  explicit Ledger(uint32_t num_blocks) : holds_(num_blocks, kNameless) {}

  // The Scheduler has given blocks to a slot, for the positions from `first` on. What it thereby forgets and the judge
  // must forget too goes to `evicted`.
  void Give(const TraceRequest& request, uint32_t first, const std::vector<uint32_t>& blocks,
            std::vector<BlockName>* evicted);
  BlockName holds(uint32_t block) const { return holds_[block]; }
  bool Holds(BlockName name) const;

  // The judge's view: an admission, a request that has left its slot, an eviction.
  void Admit(const TraceRequest& request);
  void End(const TraceRequest& request, std::vector<BlockName>* evicted);
  void Evict(BlockName name);
  uint32_t Match(const TraceRequest& request) const;  // leading blocks that are there
  bool Fits(const TraceRequest& request) const;

  int64_t free = 0;  // blocks, as the judge tells and as actions change it

 private:
  struct Name {
    uint32_t blocks = 0;  // of the Scheduler that hold it
    uint32_t pins = 0;    // of the judge
    bool there = false;   // for the judge
  };

  std::vector<BlockName> holds_;  // by the Scheduler's block
  absl::flat_hash_map<BlockName, Name> names_;
  int64_t num_there_ = 0;
  int64_t num_pinned_ = 0;
};

}  // namespace millrace
