#include "tests/cluster/sim/ledger.h"

#include <algorithm>

#include "kernels/check.h"

namespace millrace {

uint32_t TraceRequest::full_blocks() const {
  return std::min(tokens / kTraceBlock, static_cast<uint32_t>(blocks.size()));
}

uint32_t TraceRequest::nameless_blocks() const {
  const uint32_t needed = length / kTraceBlock + 1;  // with room for one more token
  return needed - std::min(needed, static_cast<uint32_t>(blocks.size()));
}

bool Ledger::Holds(BlockName name) const {
  const auto found = names_.find(name);
  return found != names_.end() && found->second.blocks > 0;
}

void Ledger::Give(const TraceRequest& request, uint32_t first, const std::vector<uint32_t>& blocks,
                  std::vector<BlockName>* evicted) {
  std::vector<BlockName> before;
  for (uint32_t i = 0; i < blocks.size(); ++i) {
    before.push_back(holds_[blocks[i]]);
    holds_[blocks[i]] = first + i < request.full_blocks() ? request.blocks[first + i] : kNameless;
    if (holds_[blocks[i]] != kNameless) ++names_[holds_[blocks[i]]].blocks;
  }
  // Afterwards, so that what the request computes again does not go.
  for (const BlockName name : before) {
    if (name == kNameless) continue;
    Name& it = names_.at(name);
    if (--it.blocks > 0 || it.pins > 0) continue;
    if (it.there) {
      evicted->push_back(name);
    } else {
      names_.erase(name);
    }
  }
}

void Ledger::Admit(const TraceRequest& request) {
  const int64_t before = num_there_;
  for (const BlockName name : request.blocks) {
    Name& it = names_[name];
    num_there_ += it.there ? 0 : 1;
    num_pinned_ += it.pins++ == 0 ? 1 : 0;
    it.there = true;
  }
  free -= num_there_ - before + request.nameless_blocks();
}

void Ledger::End(const TraceRequest& request, std::vector<BlockName>* evicted) {
  for (auto name = request.blocks.rbegin(); name != request.blocks.rend(); ++name) {
    Name& it = names_.at(*name);
    MILLRACE_CHECK(it.pins > 0, "a block is unpinned as often as pinned", *name);
    if (--it.pins > 0) continue;
    --num_pinned_;
    if (it.blocks == 0) evicted->push_back(*name);
  }
}

void Ledger::Evict(BlockName name) {
  Name& it = names_.at(name);
  MILLRACE_CHECK(it.there && it.pins == 0, "what is evicted is there and unpinned", name);
  it.there = false;
  --num_there_;
  ++free;
  if (it.blocks == 0) names_.erase(name);
}

uint32_t Ledger::Match(const TraceRequest& request) const {
  uint32_t depth = 0;
  for (; depth < request.blocks.size(); ++depth) {
    const auto found = names_.find(request.blocks[depth]);
    if (found == names_.end() || !found->second.there) break;
  }
  return depth;
}

// The judge's rule, to the letter.
bool Ledger::Fits(const TraceRequest& request) const {
  const auto size = static_cast<int64_t>(holds_.size());
  const uint32_t match = Match(request);
  int64_t idle = 0;
  for (uint32_t i = 0; i < match; ++i) idle += names_.at(request.blocks[i]).pins == 0 ? 1 : 0;
  const int64_t added = static_cast<int64_t>(request.blocks.size()) - match + request.nameless_blocks();
  const int64_t room = num_there_ + free - num_pinned_;  // neither pinned nor nameless
  return added <= free && (added + idle + size / 100 <= room || room == size);
}

}  // namespace millrace
