// Views over contiguous, row-major memory of the stream's device. A view owns nothing and does not outlive the call it
// is passed to. Another memory layout is another named type (PackedWeight, KvLayer), never a flag.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/dtype.h"

namespace millrace {

// Tokens in one block of the KV pool.
inline constexpr int kBlockTokens = 32;

template <class T>
struct Vec {
  T* data = nullptr;
  int64_t size = 0;
  constexpr T& operator[](int64_t i) const { return data[i]; }
  Vec Slice(int64_t begin, int64_t count) const { return {data + begin, count}; }
};
template <class T>
struct Vec<const T> {
  const T* data = nullptr;
  int64_t size = 0;
  Vec() = default;
  Vec(const T* d, int64_t n) : data(d), size(n) {}
  Vec(Vec<T> v) : data(v.data), size(v.size) {}  // NOLINT: a writable view is a readable one
  constexpr const T& operator[](int64_t i) const { return data[i]; }
  Vec Slice(int64_t begin, int64_t count) const { return {data + begin, count}; }
};

template <class T>
struct Mat {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  constexpr T* row(int64_t r) const { return data + r * cols; }
  Mat Rows(int64_t begin, int64_t count) const { return {row(begin), count, cols}; }
};
template <class T>
struct Mat<const T> {
  const T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  Mat() = default;
  Mat(const T* d, int64_t r, int64_t c) : data(d), rows(r), cols(c) {}
  Mat(Mat<T> m) : data(m.data), rows(m.rows), cols(m.cols) {}  // NOLINT: a writable view is a readable one
  constexpr const T* row(int64_t r) const { return data + r * cols; }
  Mat Rows(int64_t begin, int64_t count) const { return {row(begin), count, cols}; }
};

// Weights of y = W x, W [out, in], in the layout the device multiplies fastest. Filled by PackRows, read by Linear and
// Embedding. CPU: panels of kPanelRows output rows, [ceil(out / 16)][in][16], the last one padded with zeros. CUDA:
// row-major [out, in].
struct PackedWeight {
  bf16* data = nullptr;
  int64_t out = 0;
  int64_t in = 0;
};
inline constexpr int kPanelRows = 16;

// One layer's part of the KV pool: num_blocks blocks of kBlockTokens tokens. Layout by device, known to RopeAppend and
// PagedAttention alone. CPU: k [block][kv head][dim][token], v [block][kv head][token][dim].
template <class T>
struct KvLayer {
  T* k = nullptr;
  T* v = nullptr;
  int64_t num_blocks = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
};

// Rotation tables, [positions, head_dim / 2] each; any scaling of frequencies or amplitude is already in them.
struct RopeTable {
  Mat<const float> cos;
  Mat<const float> sin;
};

// A ragged batch of S sequences over T rows. Sequence i owns rows [query_start[i], query_start[i + 1]); they are its
// last tokens, so row j of sequence i sees context_len[i] - (query_start[i + 1] - 1 - j) tokens.
struct AttentionBatch {
  Vec<const int32_t> query_start;  // [S + 1]
  Vec<const int32_t> context_len;  // [S] tokens in the cache, those of this step included
  Mat<const int32_t> block_table;  // [S, max blocks] block ids, in order of position
};

}  // namespace millrace
