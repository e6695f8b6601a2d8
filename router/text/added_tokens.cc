#include "router/text/added_tokens.h"

#include <algorithm>

#include "router/text/unicode.h"
#include "router/text/utf8.h"

namespace millrace {
namespace {

uint32_t FirstCharacter(std::string_view text) { return NextUtf8(text).code_point; }

// Byte length of the last character of valid, not empty UTF-8.
size_t LastCharacterLength(std::string_view text) {
  size_t length = 1;
  while (length < text.size() && (static_cast<uint8_t>(text[text.size() - length]) & 0xC0) == 0x80) ++length;
  return length;
}

uint32_t LastCharacter(std::string_view text) {
  return FirstCharacter(text.substr(text.size() - LastCharacterLength(text)));
}

// The first of `ranges` that reaches past `begin`, nullptr when it starts at or after `end`.
const ByteRange* Touching(absl::Span<const ByteRange> ranges, size_t begin, size_t end) {
  const auto it =
      std::upper_bound(ranges.begin(), ranges.end(), begin, [](size_t at, const ByteRange& r) { return at < r.end; });
  return it != ranges.end() && it->begin < end ? &*it : nullptr;
}

}  // namespace

void AddedTokens::Trie::Insert(std::string_view content, int32_t index) {
  first[static_cast<uint8_t>(content[0])] = true;
  uint64_t node = 0;
  for (const char c : content) {
    const auto [it, inserted] = child.try_emplace(node << 8 | static_cast<uint8_t>(c), token.size());
    if (inserted) token.push_back(-1);
    node = it->second;
  }
  token[node] = index;
}

int32_t AddedTokens::Trie::Longest(std::string_view text) const {
  int32_t best = -1;
  uint64_t node = 0;
  for (const char c : text) {
    const auto it = child.find(node << 8 | static_cast<uint8_t>(c));
    if (it == child.end()) break;
    node = it->second;
    if (token[node] >= 0) best = token[node];
  }
  return best;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    (tokens_[i].normalized ? normalized_ : exact_).Insert(tokens_[i].content, static_cast<int32_t>(i));
  }
}

std::vector<AddedTokens::Segment> AddedTokens::Split(std::string_view text, absl::Span<const ByteRange> plain) const {
  std::vector<Segment> exact, out;
  SplitBy(exact_, text, text, plain, exact);
  if (normalized_.child.empty()) return exact;
  for (const Segment& segment : exact) {
    if (segment.id >= 0) {
      out.push_back(segment);
    } else {
      SplitBy(normalized_, text, segment.text, plain, out);
    }
  }
  return out;
}

void AddedTokens::SplitBy(const Trie& trie, std::string_view whole, std::string_view part,
                          absl::Span<const ByteRange> plain, std::vector<Segment>& out) const {
  const size_t base = part.data() - whole.data();
  size_t done = 0;  // everything before is in `out`
  size_t at = 0;
  while (at < part.size()) {
    const int32_t index = trie.first[static_cast<uint8_t>(part[at])] ? trie.Longest(part.substr(at)) : -1;
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[index];
    size_t begin = at, end = at + token.content.size();
    if (token.special) {
      const ByteRange* user = Touching(plain, base + begin, base + end);
      if (user != nullptr) {
        // A token that lies half in plain text must not hide a real one that starts inside it.
        at = base + begin >= user->begin && base + end <= user->end ? end : at + 1;
        continue;
      }
    }
    if (token.single_word && ((begin > 0 && IsWordCharacter(LastCharacter(part.substr(0, begin)))) ||
                              (end < part.size() && IsWordCharacter(FirstCharacter(part.substr(end)))))) {
      at = end;
      continue;
    }
    while (token.lstrip && begin > done && IsWhiteSpace(LastCharacter(part.substr(0, begin)))) {
      begin -= LastCharacterLength(part.substr(0, begin));
    }
    while (token.rstrip && end < part.size() && IsWhiteSpace(FirstCharacter(part.substr(end)))) {
      end += NextUtf8(part.substr(end)).length;
    }
    if (begin > done) out.push_back({part.substr(done, begin - done), -1});
    out.push_back({part.substr(begin, end - begin), token.id});
    done = at = end;
  }
  if (done < part.size()) out.push_back({part.substr(done), -1});
}

}  // namespace millrace
