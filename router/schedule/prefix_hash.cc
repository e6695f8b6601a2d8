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
  const auto draw = [&state] { return state = Scramble(state + 0x9e3779b97f4a7c15); };
  for (uint64_t& key_word : key_) key_word = draw();
  for (uint64_t& key_word : chain_key_) key_word = draw();
}

PrefixHash PrefixHasher::Root(std::string_view salt) const {
  PrefixHash hash{chain_key_[0] ^ salt.size(), chain_key_[1]};
  int32_t words[4];
  for (size_t at = 0; at < salt.size(); at += sizeof words) {
    std::memset(words, 0, sizeof words);
    std::memcpy(words, salt.data() + at, std::min(sizeof words, salt.size() - at));
    hash = Next(hash, words, 4);
  }
  return hash;
}

// A chunk's words x_0 … x_2m-1 become two sums  sum_i (x_2i + k_2i) * (x_2i+1 + k_2i+1)  mod 2^128, the second with the
// keys two words on: products that do not wait for each other. Then the sums are folded into the chain.
PrefixHash PrefixHasher::Next(const PrefixHash& parent, const int32_t* tokens, size_t num_tokens) const {
  PrefixHash hash = parent;
  while (num_tokens > 0) {
    const size_t n = std::min(num_tokens, kChunk);
    Wide first = 0, second = 0;
    const auto add = [&](const int32_t* four, const uint64_t* key) {
      const uint64_t x = Load(four), y = Load(four + 2);
      first += Wide{x + key[0]} * (y + key[1]);
      second += Wide{x + key[2]} * (y + key[3]);
    };
    size_t at = 0;
    for (; at + 4 <= n; at += 4) add(tokens + at, key_ + at / 2);
    if (at < n) {
      int32_t four[4] = {0, 0, 0, 0};
      std::memcpy(four, tokens + at, (n - at) * sizeof(int32_t));
      add(four, key_ + at / 2);
    }
    const auto low = [](Wide sum) { return static_cast<uint64_t>(sum); };
    const auto high = [](Wide sum) { return static_cast<uint64_t>(sum >> 64); };
    hash = {Fold(hash.lo ^ low(first) ^ chain_key_[0], hash.hi ^ high(second) ^ chain_key_[1]),
            Fold(hash.hi ^ low(second) ^ chain_key_[2], hash.lo ^ high(first) ^ chain_key_[3])};
    tokens += n;
    num_tokens -= n;
  }
  return hash;
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
