#include "router/schedule/prefix_hash.h"

#include <algorithm>
#include <cstring>

namespace millrace {
namespace {

using Wide = unsigned __int128;

uint64_t Fold(uint64_t x, uint64_t y) {
  const Wide product = Wide{x} * y;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t Load(const void* bytes) {
  uint64_t value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// A bijection without visible structure; derives the lanes' keys from the secret.
uint64_t Scramble(uint64_t x) {
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93;
  return x ^ (x >> 32);
}

}  // namespace

PrefixHasher::PrefixHasher(const uint64_t (&key)[2]) {
  uint64_t state = Scramble(key[0] + 0x9e3779b97f4a7c15) + key[1];
  for (uint64_t& lane : key_) {
    state = Scramble(state + 0x9e3779b97f4a7c15);
    lane = state | 1;
  }
}

PrefixHash PrefixHasher::Root(std::string_view salt) const {
  PrefixHash hash{key_[4] ^ salt.size(), key_[5]};
  int32_t words[4];
  for (size_t at = 0; at < salt.size(); at += sizeof words) {
    std::memset(words, 0, sizeof words);
    std::memcpy(words, salt.data() + at, std::min(sizeof words, salt.size() - at));
    hash = Next(hash, words, 4);
  }
  return hash;
}

PrefixHash PrefixHasher::Next(const PrefixHash& parent, const int32_t* tokens, size_t num_tokens) const {
  uint64_t a = parent.lo ^ key_[0];
  uint64_t b = parent.hi ^ key_[1];
  const auto mix = [&](uint64_t x, uint64_t y) {
    a = Fold(a ^ x, y ^ key_[2]);
    b = Fold(b ^ y, x ^ key_[3]);
  };
  size_t at = 0;
  for (; at + 4 <= num_tokens; at += 4) mix(Load(tokens + at), Load(tokens + at + 2));
  if (at < num_tokens) {
    int32_t words[4] = {0, 0, 0, 0};
    std::memcpy(words, tokens + at, (num_tokens - at) * sizeof(int32_t));
    mix(Load(words), Load(words + 2));
  }
  return {Fold(a ^ key_[4], b ^ key_[1]), Fold(b ^ key_[5], a ^ key_[0])};
}

void PrefixHasher::Extend(std::vector<PrefixHash>& hashes, const PrefixHash& root, const std::vector<int32_t>& tokens,
                          size_t block_tokens) const {
  const size_t full = tokens.size() / block_tokens;
  hashes.reserve(full);
  for (size_t i = hashes.size(); i < full; ++i) {
    hashes.push_back(Next(i == 0 ? root : hashes.back(), tokens.data() + i * block_tokens, block_tokens));
  }
}

}  // namespace millrace
