// Names of prefixes: a keyed 128-bit hash, chained over a salt and blocks of tokens, so that equal names mean equal
// prefixes but for an accident; PrefixIndex proves every hit by its tokens. The key is secret and no hash leaves the
// process, so nobody can prepare collisions. A value; any thread. Time: two multiplications per four tokens, and four
// per block. 16 bytes per block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace millrace {

struct PrefixHash {
  uint64_t lo = 0;
  uint64_t hi = 0;
  friend bool operator==(const PrefixHash&, const PrefixHash&) = default;
};

class PrefixHasher {
 public:
  explicit PrefixHasher(const uint64_t (&key)[2]);

  PrefixHash Root(std::string_view salt) const;
  PrefixHash Next(const PrefixHash& parent, const int32_t* tokens, size_t num_tokens) const;

  // Appends to `hashes` what it lacks: one hash per full block of `tokens`.
  void Extend(std::vector<PrefixHash>& hashes, const PrefixHash& root, const std::vector<int32_t>& tokens,
              size_t block_tokens) const;

 private:
  static constexpr size_t kChunk = 128;  // tokens that are summed before they are chained

  uint64_t key_[kChunk / 2 + 2];
  uint64_t chain_key_[4];
};

}  // namespace millrace
