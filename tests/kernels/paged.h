// A batch of sequences with a filled KV pool, blocks scattered, for attention tests.
#pragma once

#include <numeric>

#include "tests/kernels/arrays.h"

namespace millrace {

template <class A>
struct PagedBatch {
  int heads, kv_heads, dim;
  std::vector<int32_t> query_start{0};
  std::vector<int32_t> context_len;
  Array<int32_t> block_table{0, 0};
  Array<A> k{0, 0}, v{0, 0}, qkv{0, 0};

  // Sequence i has rows[i] new tokens, contexts[i] in all.
  PagedBatch(int h, int kvh, int d, const std::vector<int>& rows, const std::vector<int>& contexts)
      : heads(h), kv_heads(kvh), dim(d), context_len(contexts.begin(), contexts.end()) {
    int64_t most = 0, blocks = 0;
    for (size_t s = 0; s < rows.size(); ++s) {
      query_start.push_back(query_start.back() + rows[s]);
      const int64_t needed = (contexts[s] + kBlockTokens - 1) / kBlockTokens;
      most = std::max(most, needed);
      blocks += needed;
    }
    std::vector<int32_t> ids(blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(7));
    block_table = Array<int32_t>(static_cast<int64_t>(rows.size()), most);
    size_t next = 0;
    for (size_t s = 0; s < rows.size(); ++s) {
      for (int b = 0; b * kBlockTokens < contexts[s]; ++b) block_table.mat().row(s)[b] = ids[next++];
    }
    k = Array<A>::Random(blocks, int64_t{kv_heads} * dim * kBlockTokens, 11);
    v = Array<A>::Random(blocks, int64_t{kv_heads} * dim * kBlockTokens, 12);
    qkv = Array<A>::Random(query_start.back(), (heads + 2 * kv_heads) * dim, 13);
  }
  // What lies in slots no token owns must not matter.
  void PoisonUnusedSlots() {
    for (size_t s = 0; s < context_len.size(); ++s) {
      for (int t = context_len[s]; t % kBlockTokens != 0; ++t) {
        for (int h = 0; h < kv_heads; ++h) {
          for (int d = 0; d < dim; ++d) {
            const int64_t block = block_table.view().row(s)[t / kBlockTokens], offset = t % kBlockTokens;
            k.mat().row(block)[(h * dim + d) * kBlockTokens + offset] = A(NAN);
            v.mat().row(block)[(h * kBlockTokens + offset) * dim + d] = A(NAN);
          }
        }
      }
    }
  }
  KvLayer<A> kv() { return {k.values.data(), v.values.data(), k.rows, kv_heads, dim}; }
  AttentionBatch batch() const { return {View(query_start), View(context_len), block_table.view()}; }
  double key(int64_t s, int64_t token, int h, int d) const {
    return k.at(block_table.view().row(s)[token / kBlockTokens], (h * dim + d) * kBlockTokens + token % kBlockTokens);
  }
  double value(int64_t s, int64_t token, int h, int d) const {
    return v.at(block_table.view().row(s)[token / kBlockTokens], (h * kBlockTokens + token % kBlockTokens) * dim + d);
  }
};

}  // namespace millrace
