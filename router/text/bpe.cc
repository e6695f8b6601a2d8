#include "router/text/bpe.h"

#include <algorithm>
#include <queue>
#include <tuple>

namespace millrace {
namespace {

// Up to here a scan over the pairs beats a heap.
constexpr size_t kShortPiece = 48;
// Longer tokens take the merging path; keeps loading linear however long a vocabulary's tokens are.
constexpr size_t kLongestWhole = 256;

}  // namespace

Bpe::Bpe(Parts parts) : parts_(std::move(parts)) {
  byte_id_.fill(kNone);
  for (int byte = 0; byte < 256; ++byte) {
    const auto it = parts_.id_of.find(std::string(1, static_cast<char>(byte)));
    if (it != parts_.id_of.end()) byte_id_[byte] = it->second;
  }
  if (parts_.ignore_merges) {
    whole_ = parts_.id_of;
    return;
  }
  std::vector<int32_t> ids;
  for (const auto& [bytes, id] : parts_.id_of) {
    if (bytes.size() > kLongestWhole) continue;
    ids.clear();
    EncodeByMerging(bytes, ids);
    if (ids.size() == 1 && ids[0] == id) whole_.emplace(bytes, id);
  }
}

void Bpe::Encode(std::string_view piece, std::vector<int32_t>& out) const {
  const auto it = whole_.find(piece);
  if (it != whole_.end()) {
    out.push_back(it->second);
  } else {
    EncodeByMerging(piece, out);
  }
}

void Bpe::EncodeByMerging(std::string_view piece, std::vector<int32_t>& out) const {
  std::vector<int32_t> symbols = Symbols(piece);
  if (symbols.size() <= kShortPiece) {
    MergeShort(symbols);
  } else {
    MergeLong(symbols);
  }
  out.insert(out.end(), symbols.begin(), symbols.end());
}

std::vector<int32_t> Bpe::Symbols(std::string_view piece) const {
  std::vector<int32_t> symbols;
  symbols.reserve(piece.size());
  bool after_unknown = false;
  for (const char c : piece) {
    const int32_t id = byte_id_[static_cast<uint8_t>(c)];
    if (id != kNone) {
      symbols.push_back(id);
    } else if (parts_.unknown != kNone && !(parts_.fuse_unknown && after_unknown)) {
      symbols.push_back(parts_.unknown);
    }
    after_unknown = id == kNone;
  }
  return symbols;
}

const Bpe::Merge* Bpe::FindMerge(int32_t left, int32_t right) const {
  const auto it = parts_.merges.find(std::pair(left, right));
  return it == parts_.merges.end() ? nullptr : &it->second;
}

void Bpe::MergeShort(std::vector<int32_t>& symbols) const {
  const Merge* pair[kShortPiece] = {};  // pair[i]: the merge of symbols i and i + 1
  for (size_t i = 0; i + 1 < symbols.size(); ++i) pair[i] = FindMerge(symbols[i], symbols[i + 1]);
  while (symbols.size() > 1) {
    size_t best = symbols.size();
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      if (pair[i] != nullptr && (best == symbols.size() || pair[i]->rank < pair[best]->rank)) best = i;
    }
    if (best == symbols.size()) return;
    symbols[best] = pair[best]->merged;
    symbols.erase(symbols.begin() + best + 1);
    std::copy(pair + best + 2, pair + symbols.size() + 1, pair + best + 1);
    pair[best] = best + 1 < symbols.size() ? FindMerge(symbols[best], symbols[best + 1]) : nullptr;
    if (best > 0) pair[best - 1] = FindMerge(symbols[best - 1], symbols[best]);
  }
}

void Bpe::MergeLong(std::vector<int32_t>& symbols) const {
  struct Candidate {
    int32_t rank;
    int32_t at;
    int32_t left, right;  // the ids when this was queued; the entry is stale once either differs
    bool operator>(const Candidate& other) const { return std::tie(rank, at) > std::tie(other.rank, other.at); }
  };
  const int32_t count = static_cast<int32_t>(symbols.size());
  std::vector<int32_t> previous(count), next(count);
  std::vector<Candidate> initial;
  initial.reserve(count);
  for (int32_t i = 0; i < count; ++i) {
    previous[i] = i - 1;
    next[i] = i + 1;
    if (i + 1 == count) break;
    const Merge* merge = FindMerge(symbols[i], symbols[i + 1]);
    if (merge != nullptr) initial.push_back({merge->rank, i, symbols[i], symbols[i + 1]});
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(std::greater<>(), std::move(initial));
  const auto push = [&](int32_t at) {
    if (at < 0 || next[at] >= count) return;
    const Merge* merge = FindMerge(symbols[at], symbols[next[at]]);
    if (merge != nullptr) queue.push({merge->rank, at, symbols[at], symbols[next[at]]});
  };
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    const int32_t right = symbols[top.at] == top.left ? next[top.at] : count;
    if (right >= count || symbols[right] != top.right) continue;
    symbols[top.at] = FindMerge(top.left, top.right)->merged;
    symbols[right] = kNone;
    next[top.at] = next[right];
    if (next[right] < count) previous[next[right]] = top.at;
    push(previous[top.at]);
    push(top.at);
  }
  symbols.erase(std::remove(symbols.begin(), symbols.end(), kNone), symbols.end());
}

}  // namespace millrace
