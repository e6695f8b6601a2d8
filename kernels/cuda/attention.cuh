// What the two kernels of PagedAttention agree on: the context's chunks and how their results combine.
#pragma once

#include "kernels/cuda/device.cuh"

namespace millrace::cuda {

constexpr int kChunkTokens = 128;  // of the context, from its start
constexpr int kTileQueries = 16;   // rows of one sequence times query heads of one kv head
constexpr int kMaxSplitRows = 16;  // sequences with more rows have tiles enough to keep the GPU busy
constexpr int kMaxSequences = 4096;

struct AttentionArgs {
  const bf16* qkv;
  bf16* out;
  KvLayer<bf16> kv;
  AttentionBatch batch;
  int heads;
  int group;                // query heads of a kv head
  float scale;              // times log2 e: exponentials are powers of two
  int64_t max_partials;     // (chunk, row) pairs whose results fit in the workspace
  int32_t* first_partial;   // [S] the sequence's first, or -1 where one warp walks all its chunks
  float* partial_out;       // [max_partials, H, D] sum of p * v
  float2* partial_max_sum;  // [max_partials, H]

  __device__ int Sequences() const { return static_cast<int>(batch.context_len.size); }
  __device__ int FirstRow(int s) const { return batch.query_start.data[s]; }
  __device__ int Context(int s) const { return batch.context_len.data[s]; }
  __device__ int Rows(int s) const { return FirstRow(s + 1) - FirstRow(s); }
  __device__ int Chunks(int s) const { return static_cast<int>(DivideUp(Context(s), kChunkTokens)); }
  __device__ int Tiles(int s) const { return static_cast<int>(DivideUp(Rows(s) * group, kTileQueries)); }
};

// The largest score of some tokens and the sum of their exponentials relative to it.
struct MaxSum {
  float max = -INFINITY;
  float sum = 0;
};

// Both sets of tokens together; `keep_a` and `keep_b` bring their sums of p * v to the common maximum.
__device__ __forceinline__ MaxSum Combine(MaxSum a, MaxSum b, float& keep_a, float& keep_b) {
  const float max = fmaxf(a.max, b.max);
  const float base = max == -INFINITY ? 0.0f : max;
  keep_a = exp2f(a.max - base);
  keep_b = exp2f(b.max - base);
  return {max, __fmaf_rn(b.sum, keep_b, __fmul_rn(a.sum, keep_a))};
}
__device__ __forceinline__ float CombineOut(float a, float keep_a, float b, float keep_b) {
  return __fmaf_rn(b, keep_b, __fmul_rn(a, keep_a));
}

}  // namespace millrace::cuda
