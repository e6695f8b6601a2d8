#include "worker/engine/draft_table.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <system_error>

#include "absl/numeric/int128.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

struct Header {
  char magic[8];
  uint32_t vocab_size;
  uint32_t num_entries;
};
static_assert(sizeof(Header) == 16);

// SplitMix64's finalizer (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014) over the tokens.
uint64_t HashOf(const int32_t* context, size_t size) {
  uint64_t hash = size;
  for (size_t i = 0; i < size; ++i) {
    hash = (hash ^ static_cast<uint32_t>(context[i])) + 0x9e3779b97f4a7c15;
    hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
    hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
    hash ^= hash >> 31;
  }
  return hash;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const DraftTable>> DraftTable::Load(const std::filesystem::path& path,
                                                                   int64_t vocab_size) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return nullptr;
  std::ifstream file(path, std::ios::binary);
  Header header{};
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  const uint64_t size = std::filesystem::file_size(path, error);
  const auto bad = [&](const auto&... reason) {
    return absl::DataLossError(absl::StrCat(path.string(), " is no draft table for this model: ", reason...));
  };
  if (!file || error) return bad("it cannot be read");
  if (std::memcmp(header.magic, "MRDRAFT1", sizeof(header.magic)) != 0) return bad("it does not begin with MRDRAFT1");
  if (header.vocab_size != vocab_size) {
    return bad("its vocabulary has ", header.vocab_size, " tokens, the model's ", vocab_size);
  }
  if (size != sizeof(header) + header.num_entries * sizeof(Entry)) {
    return bad("it has ", size, " bytes, which ", header.num_entries, " entries are not");
  }
  std::vector<Entry> entries(header.num_entries);
  file.read(reinterpret_cast<char*>(entries.data()), static_cast<std::streamsize>(entries.size() * sizeof(Entry)));
  if (!file) return bad("it cannot be read to its end");
  if (std::ranges::all_of(entries, [](const Entry& entry) { return entry.likelihood() > 0; })) {
    return bad("no entry is free");
  }
  for (const Entry& entry : entries) {
    if (entry.token() >= vocab_size) return bad("it holds token ", entry.token());
  }
  return std::shared_ptr<const DraftTable>(new DraftTable(std::move(entries)));
}

const DraftTable::Entry* DraftTable::Find(const int32_t* context, size_t size) const {
  const uint64_t hash = HashOf(context, size);
  for (size_t at = absl::Uint128High64(absl::uint128(hash) * entries_.size());;
       at = at + 1 < entries_.size() ? at + 1 : 0) {
    const Entry& entry = entries_[at];
    if (entry.likelihood() == 0) return nullptr;
    if (entry.check == static_cast<uint32_t>(hash)) return &entry;
  }
}

std::vector<int32_t> DraftTable::Draft(Vec<const int32_t> tokens, int32_t max_count) const {
  std::array<int32_t, kMaxContext> context;  // the last `known` of it
  size_t known = std::min(static_cast<size_t>(tokens.size), kMaxContext);
  std::copy_n(tokens.data + tokens.size - static_cast<int64_t>(known), known, context.end() - known);
  std::vector<int32_t> draft;
  double likelihood = 1;
  while (std::ssize(draft) < max_count) {
    const Entry* entry = nullptr;
    for (size_t size = known; size > 0 && entry == nullptr; --size) entry = Find(context.end() - size, size);
    if (entry == nullptr) break;
    likelihood *= entry->likelihood() / 255.0;
    if (likelihood < kLeastLikely) break;
    draft.push_back(entry->token());
    std::shift_left(context.begin(), context.end(), 1);
    context.back() = entry->token();
    known = std::min(known + 1, kMaxContext);
  }
  return draft;
}

}  // namespace millrace
