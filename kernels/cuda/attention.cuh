// What the kernels of PagedAttention agree on, so that a row's bits do not depend on which of them computed it:
//   The context is cut into chunks of 128 tokens by absolute position. Of a chunk, q . k is one chain of tensor-core
//   steps of 16 dims; exponentials are relative to the chunk's largest score; their sum is taken by four threads
//   (tokens 2 t, 2 t + 1 of each eight), each block of 32 apart, blocks added in order, then threads t and t ^ 1, then
//   t ^ 2; p . v is one chain of steps of 16 tokens, begun at zero. Chunks are combined in order.
// Steps whose tokens a row does not see add exact zeros, so it does not matter whether a kernel skips them.
#pragma once

#include "kernels/cuda/attention_cache.cuh"
#include "kernels/cuda/device.cuh"

namespace millrace::cuda {

constexpr int kChunkTokens = 128;
constexpr int kChunkBlocks = kChunkTokens / kBlockTokens;
constexpr int kTileQueries = 16;  // at most, of a tile of the kernels for few queries
constexpr int kMaxSequences = 4096;

struct AttentionArgs {
  const bf16* qkv;
  bf16* out;
  KvLayer<bf16> kv;
  AttentionBatch batch;
  int heads;
  int group;            // query heads of a kv head
  float scale;          // times log2 e: exponentials are powers of two
  int tile_queries;     // at most kTileQueries
  int many_queries;     // sequences with as many (rows times group) are the other kernel's
  int num_slots;        // a chunk's results, where several blocks share a tile
  float* slot_out;      // [slots, tile_queries, D] sum of p * v
  float2* slot_states;  // [slots, tile_queries] MaxSum
  int* counters;        // zeros between kernels

  __device__ int Sequences() const { return static_cast<int>(batch.context_len.size); }
  __device__ int FirstRow(int s) const { return batch.query_start.data[s]; }
  __device__ int Context(int s) const { return batch.context_len.data[s]; }
  __device__ int Rows(int s) const { return FirstRow(s + 1) - FirstRow(s); }
  // Row `row` of q head `head` of all.
  __device__ const bf16* Query(int64_t row, int head) const {
    return qkv + (row * (heads + 2 * kv.num_kv_heads) + head) * kv.head_dim;
  }
  // The first element of a kv head in block `index` of a sequence.
  __device__ int64_t Block(int sequence, int kv_head, int index) const {
    return BlockOfId(batch.block_table.data[sequence * batch.block_table.cols + index], kv_head);
  }
  __device__ int64_t BlockOfId(int64_t id, int kv_head) const {
    Require(id >= 0 && id < kv.num_blocks);
    return (id * kv.num_kv_heads + kv_head) * (kBlockTokens * kv.head_dim);
  }
};

// Some queries of one sequence and kv head: query i is row i / group, head i % group of the group.
struct Tile {
  int sequence;
  int kv_head;
  int first_query;
  int queries;
  int first_row;  // of the sequence, among all rows
  int unseen;     // row r of the sequence sees r + unseen tokens
  int limit;      // tokens that any of the tile's rows sees

  Tile() = default;
  __device__ Tile(const AttentionArgs& args, int s, int head, int first, int most) : sequence(s), kv_head(head) {
    first_row = args.FirstRow(s);
    const int rows = args.FirstRow(s + 1) - first_row;
    first_query = first;
    queries = min(most, rows * args.group - first);
    unseen = args.Context(s) - rows + 1;
    limit = (rows == 1 ? 0 : (first + queries - 1) / args.group) + unseen;
  }
  __device__ int Chunks() const { return (limit + kChunkTokens - 1) / kChunkTokens; }
  // Tokens that query i of the tile sees; 0 beyond its queries.
  __device__ int Visible(const AttentionArgs& args, int i) const {
    return i < queries ? (first_query + i) / args.group + unseen : 0;
  }
  __device__ const bf16* Query(const AttentionArgs& args, int i) const {
    const int query = first_query + i;
    return args.Query(first_row + query / args.group, kv_head * args.group + query % args.group);
  }
  __device__ bf16* Out(const AttentionArgs& args, int i) const {
    const int query = first_query + i, head = kv_head * args.group + query % args.group;
    return args.out + (int64_t{first_row + query / args.group} * args.heads + head) * args.kv.head_dim;
  }
};

// 2^x; results below the smallest normal number are 0.
__device__ __forceinline__ float PowerOfTwo(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// The largest score of some tokens and the sum of their exponentials relative to it.
struct MaxSum {
  float max = -INFINITY;
  float sum = 0;
};

// Both sets of tokens together; `keep_a` and `keep_b` bring their sums of p * v to the common maximum.
__device__ __forceinline__ MaxSum Combine(MaxSum a, MaxSum b, float& keep_a, float& keep_b) {
  const float max = fmaxf(a.max, b.max);
  const float base = max == -INFINITY ? 0.0f : max;
  keep_a = PowerOfTwo(a.max - base);
  keep_b = PowerOfTwo(b.max - base);
  return {max, __fmaf_rn(b.sum, keep_b, __fmul_rn(a.sum, keep_a))};
}
__device__ __forceinline__ float CombineOut(float a, float keep_a, float b, float keep_b) {
  return __fmaf_rn(b, keep_b, __fmul_rn(a, keep_a));
}

// A score becomes an exponential; `base` is the largest, scaled.
__device__ __forceinline__ float Soften(float score, float scale, float base) {
  return PowerOfTwo(__fmaf_rn(score, scale, -base));
}
__device__ __forceinline__ float Base(float scaled_max) { return scaled_max == -INFINITY ? 0.0f : scaled_max; }

// The kernels' launchers. Few queries: any sequence with less than args.many_queries; many: the others, heads of 64 or
// 128. Both write every row of theirs. One sequence: of one row, and no other; false where it would gain nothing.
void AttendFewQueries(const AttentionArgs& args, Stream& stream);
void AttendManyQueries(const AttentionArgs& args, Stream& stream);
bool AttendOneSequence(const AttentionArgs& args, Stream& stream);

}  // namespace millrace::cuda
