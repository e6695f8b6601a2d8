// What a worker has kept from the router before: names for its blocks.
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "router/schedule/running_set.h"

namespace millrace {
namespace {

constexpr size_t kMaxSaltBytes = 128;

absl::Status Breach(BlockId block, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("cached block ", block, ": ", what));
}

}  // namespace

absl::Status RunningSet::Adopt(absl::Span<const worker::v1::CachedBlocks> cached, uint32_t vocab_size) {
  struct Name {
    PrefixHash root, hash;
  };
  absl::flat_hash_map<BlockId, Name> names;
  std::vector<BlockId> adopted;
  for (const worker::v1::CachedBlocks& message : cached) {
    for (const worker::v1::CachedBlock& it : message.blocks()) {
      const BlockId block = it.block();
      if (block >= pool_.size()) return Breach(block, absl::StrCat("the limit is ", pool_.size() - 1));
      if (names.contains(block)) return Breach(block, "it comes twice; the limit is once");
      if (it.token_ids_size() != static_cast<int>(block_tokens_)) {
        return Breach(block, absl::StrCat("it holds ", it.token_ids_size(), " tokens; the limit is ", block_tokens_));
      }
      for (const int32_t token : it.token_ids()) {
        if (token >= 0 && static_cast<uint32_t>(token) < vocab_size) continue;
        return Breach(block, absl::StrCat("token ", token, " is not within 0 … ", vocab_size - 1));
      }
      if (it.cache_salt().size() > kMaxSaltBytes || (it.has_parent() && !it.cache_salt().empty())) {
        return Breach(block, absl::StrCat("cache_salt has ", it.cache_salt().size(), " bytes; the limit is ",
                                          it.has_parent() ? 0 : kMaxSaltBytes));
      }
      const auto parent = names.find(it.has_parent() ? it.parent() : kNone);
      if (it.has_parent() && parent == names.end()) {
        return Breach(block, absl::StrCat("its parent, ", it.parent(), ", has not come before it"));
      }
      Name name;
      name.root = it.has_parent() ? parent->second.root : hasher_->Root(it.cache_salt());
      name.hash =
          hasher_->Next(it.has_parent() ? parent->second.hash : name.root, it.token_ids().data(), block_tokens_);
      names[block] = name;
      const EntryId parent_entry = it.has_parent() ? pool_.entry(it.parent()) : kNone;
      if (it.has_parent() && parent_entry == kNone) continue;  // by an accident of hashes
      const EntryId entry =
          index_->Insert(name.root, parent_entry, name.hash, it.token_ids().data(), {place_, block, kNone});
      if (entry == kNone) continue;
      pool_.Pin(block);
      pool_.SetEntry(block, entry);
      adopted.push_back(block);
    }
  }
  // The first that is unpinned is the first to be reused.
  for (; !adopted.empty(); adopted.pop_back()) pool_.Unpin(adopted.back());
  return absl::OkStatus();
}

}  // namespace millrace
