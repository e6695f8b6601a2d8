// Byte-pair encoding of one piece of text: start from single bytes, merge the adjacent pair of lowest rank (the
// leftmost of equals) until no pair is left. n log n time and about 44 bytes per byte for long pieces. Built once by
// the loader, then constant and safe for any number of threads.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "router/text/bytes_map.h"

namespace millrace {

class Bpe {
 public:
  static constexpr int32_t kNone = -1;

  struct Merge {
    int32_t rank;
    int32_t merged;
  };
  struct Parts {
    BytesMap<int32_t> id_of;                                         // a token's bytes → its id
    absl::flat_hash_map<std::pair<int32_t, int32_t>, Merge> merges;  // (left id, right id)
    bool ignore_merges = false;                                      // a piece that is a token is that token
    int32_t unknown = kNone;    // stands for bytes without a token; kNone drops them
    bool fuse_unknown = false;  // neighbouring unknowns become one
  };
  explicit Bpe(Parts parts);

  void Encode(std::string_view piece, std::vector<int32_t>& out) const;

 private:
  std::vector<int32_t> Symbols(std::string_view piece) const;
  const Merge* FindMerge(int32_t left, int32_t right) const;
  void MergeShort(std::vector<int32_t>& symbols) const;
  void MergeLong(std::vector<int32_t>& symbols) const;
  void EncodeByMerging(std::string_view piece, std::vector<int32_t>& out) const;

  Parts parts_;
  std::array<int32_t, 256> byte_id_;
  // Tokens that merging produces from their own bytes: for these a whole piece needs one look-up and no merging.
  BytesMap<int32_t> whole_;
};

}  // namespace millrace
