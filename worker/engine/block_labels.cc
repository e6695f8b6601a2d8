#include "worker/engine/block_labels.h"

#include <algorithm>
#include <numeric>

#include "kernels/check.h"

namespace millrace {
namespace {

constexpr int kBlocksPerMessage = 1024;

}  // namespace

BlockLabels::BlockLabels(const EngineLimits& limits)
    : labels_(static_cast<size_t>(limits.num_blocks)),
      tokens_(labels_.size() * kBlockTokens),
      admissions_(static_cast<size_t>(limits.num_slots)) {}

void BlockLabels::Admitted(int32_t slot, const Slot& it) {
  admissions_[static_cast<size_t>(slot)] = ++num_admissions_;
  const auto num_cached = static_cast<size_t>(it.num_cached_tokens / kBlockTokens);
  for (size_t i = 0; i < it.block_table.size(); ++i) {
    if (i < num_cached) {
      at(it.block_table[i]).used = num_admissions_;
    } else {
      Overwrite(slot, it.block_table[i]);
    }
  }
}

void BlockLabels::Extended(int32_t slot, const google::protobuf::RepeatedField<uint32_t>& blocks) {
  for (const uint32_t block : blocks) Overwrite(slot, static_cast<int32_t>(block));
}

void BlockLabels::Overwrite(int32_t slot, int32_t block) {
  at(block) = {};
  at(block).used = admissions_[static_cast<size_t>(slot)];
  salts_.erase(block);
}

// What it computed earlier is labelled, so only the last of its full blocks are looked at.
void BlockLabels::Computed(int32_t slot, const Slot& it, int32_t num_computed) {
  const int32_t first = it.num_cached_tokens / kBlockTokens, end = num_computed / kBlockTokens;
  int32_t index = end;
  while (index > first && at(it.block_table[static_cast<size_t>(index - 1)]).serial == 0) --index;
  for (; index < end; ++index) Set(slot, it, index);
}

void BlockLabels::Set(int32_t slot, const Slot& it, int32_t index) {
  const int32_t block = it.block_table[static_cast<size_t>(index)];
  Label label;
  if (index > 0) {
    label.parent = it.block_table[static_cast<size_t>(index - 1)];
    label.parent_serial = at(label.parent).serial;
    if (label.parent_serial == 0) return;
  } else if (!it.cache_salt.empty()) {
    salts_[block] = it.cache_salt;
  }
  for (int32_t i = 0; i < kBlockTokens; ++i) {
    const int32_t token = it.token(index * kBlockTokens + i);
    MILLRACE_CHECK(token >= 0, "a computed token is known", slot, index);
    tokens_[static_cast<size_t>(block) * kBlockTokens + static_cast<size_t>(i)] = token;
  }
  label.serial = ++last_serial_;
  label.used = std::max(at(block).used, admissions_[static_cast<size_t>(slot)]);
  at(block) = label;
}

void BlockLabels::DraftComputed(const Slot& it, int32_t num_before, int32_t num_computed) {
  for (int32_t index = num_before / kBlockTokens; index < num_computed / kBlockTokens; ++index) {
    Label& label = at(it.block_table[static_cast<size_t>(index)]);
    label.draft_computed = label.serial != 0;
  }
}

bool BlockLabels::AppendCachedTokens(const Slot& it, std::vector<int32_t>* tokens) const {
  for (int32_t index = 0; index < it.num_cached_tokens / kBlockTokens; ++index) {
    const int32_t block = it.block_table[static_cast<size_t>(index)];
    if (at(block).serial == 0) return false;
    const auto first = tokens_.begin() + static_cast<std::ptrdiff_t>(block) * kBlockTokens;
    tokens->insert(tokens->end(), first, first + kBlockTokens);
  }
  return true;
}

int32_t BlockLabels::NumDraftComputed(const Slot& it) const {
  int32_t index = 0;
  for (; index < it.num_cached_tokens / kBlockTokens; ++index) {
    if (!at(it.block_table[static_cast<size_t>(index)]).draft_computed) break;
  }
  return index * kBlockTokens;
}

void BlockLabels::Forget(const Slot& it) {
  for (auto i = static_cast<size_t>(it.num_cached_tokens / kBlockTokens); i < it.block_table.size(); ++i) {
    at(it.block_table[i]).serial = 0;
    at(it.block_table[i]).draft_computed = false;
  }
}

std::vector<worker::v1::CachedBlocks> BlockLabels::List() const {
  std::vector<int32_t> recent(labels_.size());
  std::iota(recent.begin(), recent.end(), 0);
  std::erase_if(recent, [&](int32_t block) { return at(block).serial == 0; });
  std::ranges::stable_sort(recent, [&](int32_t a, int32_t b) { return at(a).used > at(b).used; });
  std::vector<worker::v1::CachedBlocks> list;
  std::vector<bool> listed(labels_.size());
  std::vector<int32_t> chain;
  size_t num_tokens = 0;
  for (const int32_t block : recent) {
    chain.clear();
    int32_t next = block;
    bool whole = true;
    while (next >= 0 && !listed[static_cast<size_t>(next)] && whole) {
      chain.push_back(next);
      const Label& label = at(next);
      next = label.parent;
      whole = next < 0 || at(next).serial == label.parent_serial;
    }
    if (!whole) continue;
    num_tokens += chain.size() * kBlockTokens;
    if (num_tokens > kMaxListedTokens) break;
    for (; !chain.empty(); chain.pop_back()) {
      Add(chain.back(), &list);
      listed[static_cast<size_t>(chain.back())] = true;
    }
  }
  return list;
}

void BlockLabels::Add(int32_t block, std::vector<worker::v1::CachedBlocks>* list) const {
  if (list->empty() || list->back().blocks_size() == kBlocksPerMessage) list->emplace_back();
  worker::v1::CachedBlock& out = *list->back().add_blocks();
  out.set_block(static_cast<uint32_t>(block));
  if (at(block).parent >= 0) out.set_parent(static_cast<uint32_t>(at(block).parent));
  if (const auto salt = salts_.find(block); salt != salts_.end()) out.set_cache_salt(salt->second);
  const auto first = tokens_.begin() + static_cast<std::ptrdiff_t>(block) * kBlockTokens;
  out.mutable_token_ids()->Assign(first, first + kBlockTokens);
}

}  // namespace millrace
