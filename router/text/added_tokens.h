// The tokens that are recognised in the text itself, before any splitting: control tokens such as <|im_end|> and the
// other added tokens. Leftmost match wins, then the longest. Constant after loading, safe for any number of threads.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"

namespace millrace {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;   // looked for only where no token without this flag was found
  bool single_word = false;  // no letter, digit or underscore may touch it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // and after it
};

// Half-open byte ranges of a text, ascending and disjoint.
struct ByteRange {
  size_t begin;
  size_t end;
};

class AddedTokens {
 public:
  static constexpr size_t kMaxContentBytes = 256;

  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);  // contents distinct, not empty, at most kMaxContentBytes

  struct Segment {
    std::string_view text;  // ordinary text when id < 0
    int32_t id;
  };
  // Cuts `text` into ordinary text and added tokens. Special tokens that touch a range of `plain` are ordinary text.
  std::vector<Segment> Split(std::string_view text, absl::Span<const ByteRange> plain) const;

 private:
  // The tokens of one flag value as a byte trie.
  struct Trie {
    absl::flat_hash_map<uint64_t, int32_t> child;  // node << 8 | byte → node
    std::vector<int32_t> token = {-1};             // node → index into tokens_, -1 for none
    std::array<bool, 256> first = {};
    void Insert(std::string_view content, int32_t index);
    // The longest token that `text` starts with, -1 for none.
    int32_t Longest(std::string_view text) const;
  };
  void SplitBy(const Trie& trie, std::string_view whole, std::string_view part, absl::Span<const ByteRange> plain,
               std::vector<Segment>& out) const;

  std::vector<AddedToken> tokens_;
  Trie exact_, normalized_;
};

}  // namespace millrace
