// out[t, h] = sum over s of softmax_s(scale * q[t, h] . k[s]) * v[s].
// The context is cut into chunks of 128 tokens by absolute position. A warp computes one chunk for 16 queries (rows
// times heads of a group, the 16-row side of mma.sync) block by block with an online softmax; chunks are combined in
// order. Long contexts with few rows are split: one warp per chunk, results to the workspace, and a second kernel
// combines; otherwise one warp walks and combines all chunks. Both do the same operations on a row, whatever else is in
// the batch. K and V go from the cache straight to registers, 16 bytes a load. The tensor core sums over dims (q . k)
// and tokens (p . v) in any fixed order, so each is permuted to make a thread's share contiguous: thread 4 g + t of a
// warp has dims 8 t .. 8 t + 7 of each 32 for q . k, and tokens 8 t .. 8 t + 7 of the block's 32 for p . v. Bound:
// bytes, 4 D per token and kv head for few rows; 4 D FLOPs per query and token for many. H200, 2026-11-30, D = 128: 81
// % of a copy's 4230 GB/s for 256 sequences of 1024 tokens (16 heads, 8 kv heads), 59 % for 32 (32, 8), 6 % for one
// (launches and latency: 18 us); 15 % of 790 TFLOP/s for 4 prompts of 2048.
#include "kernels/check.h"
#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kPairs = kBlockTokens / 8;  // tiles of eight tokens in a block

__device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// The keys of one block: thread 4 g + t has, for each tile j of eight tokens, its share of token token(j, g), the one
// that becomes column g of the tile: columns 2 t and 2 t + 1 of the tiles are then tokens 8 t + 2 j and + 1.
template <int D>
struct Keys {
  uint4 wide[kPairs][D / 32];
  uint2 narrow[kPairs];  // the last 16 dims where D is no multiple of 32

  __device__ __forceinline__ void Load(const bf16* block) {
    const int g = Lane() / 4, t = Lane() % 4;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const bf16* token = block + (g / 2 * 8 + j * 2 + g % 2) * D;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) wide[j][i] = __ldg(reinterpret_cast<const uint4*>(token + i * 32 + t * 8));
      if constexpr (D % 32 != 0) narrow[j] = __ldg(reinterpret_cast<const uint2*>(token + D / 32 * 32 + t * 4));
    }
  }
};

// scores[j] = q . k for the tokens of tile j; q is the tile of 16 queries in shared memory.
template <int D>
__device__ __forceinline__ void Score(float (&scores)[kPairs][4], const bf16* q, const Keys<D>& keys) {
  const int g = Lane() / 4, t = Lane() % 4;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) scores[j][0] = scores[j][1] = scores[j][2] = scores[j][3] = 0;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const uint4 a = *reinterpret_cast<const uint4*>(q + g * D + i * 32 + t * 8);
    const uint4 b = *reinterpret_cast<const uint4*>(q + (g + 8) * D + i * 32 + t * 8);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) Multiply(scores[j], a.x, b.x, a.y, b.y, keys.wide[j][i].x, keys.wide[j][i].y);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) Multiply(scores[j], a.z, b.z, a.w, b.w, keys.wide[j][i].z, keys.wide[j][i].w);
  }
  if constexpr (D % 32 != 0) {
    const uint2 a = *reinterpret_cast<const uint2*>(q + g * D + D / 32 * 32 + t * 4);
    const uint2 b = *reinterpret_cast<const uint2*>(q + (g + 8) * D + D / 32 * 32 + t * 4);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) Multiply(scores[j], a.x, b.x, a.y, b.y, keys.narrow[j].x, keys.narrow[j].y);
  }
}

// One chunk for one tile of queries. Thread 4 g + t holds rows g (half 0) and g + 8 (half 1), dims 8 n + 2 t and + 1.
template <int D>
struct Chunk {
  float out[D / 8][4];
  MaxSum state[2];  // until Finish the sum is this thread's own

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
    state[0] = state[1] = MaxSum{};
  }

  // Scores become exponentials; what came before is brought to the new maximum. `seen[half]` tokens of the block are
  // visible.
  __device__ __forceinline__ void Soften(float (&scores)[kPairs][4], const int (&seen)[2], float scale) {
    const int t = Lane() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = state[half].max;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = scores[j][2 * half + e];
          s = t * 8 + j * 2 + e < seen[half] ? s * scale : -INFINITY;
          max = fmaxf(max, s);
        }
      }
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      const float base = max == -INFINITY ? 0.0f : max;
      const float keep = exp2f(state[half].max - base);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = scores[j][2 * half + e];
          s = exp2f(s - base);
          sum += s;
        }
      }
      state[half].max = max;
      state[half].sum = __fmaf_rn(state[half].sum, keep, sum);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        out[n][2 * half] *= keep;
        out[n][2 * half + 1] *= keep;
      }
    }
  }

  // out += p * v; tokens at and beyond `filled` hold nothing and count as zeros.
  __device__ __forceinline__ void Accumulate(const float (&p)[kPairs][4], const uint4 (&values)[D / 8], int filled) {
    const int t = Lane() % 4;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t a0 = PackPair(p[2 * step][0], p[2 * step][1]), a1 = PackPair(p[2 * step][2], p[2 * step][3]);
      const uint32_t a2 = PackPair(p[2 * step + 1][0], p[2 * step + 1][1]);
      const uint32_t a3 = PackPair(p[2 * step + 1][2], p[2 * step + 1][3]);
      const int own = filled - (t * 8 + step * 4);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        uint32_t b0 = step == 0 ? values[n].x : values[n].z, b1 = step == 0 ? values[n].y : values[n].w;
        if (filled < kBlockTokens) {
          b0 = own >= 2 ? b0 : own == 1 ? b0 & 0xffffu : 0u;
          b1 = own >= 4 ? b1 : own == 3 ? b1 & 0xffffu : 0u;
        }
        Multiply(out[n], a0, a1, a2, a3, b0, b1);
      }
    }
  }

  __device__ __forceinline__ void Finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state[half].sum += __shfl_xor_sync(~0u, state[half].sum, 1);
      state[half].sum += __shfl_xor_sync(~0u, state[half].sum, 2);
    }
  }
};

// The queries of an item, and what each row of this thread sees.
struct TileRows {
  int row[2];      // of the sequence
  int head[2];     // of all query heads
  int visible[2];  // tokens; 0 beyond the last query

  __device__ TileRows(const AttentionArgs& args, const AttendItem& item) {
    const int rows = args.Rows(item.sequence);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = item.tile * kTileQueries + Lane() / 4 + half * 8;
      row[half] = query / args.group;
      head[half] = item.kv_head * args.group + query % args.group;
      visible[half] = row[half] < rows ? args.Context(item.sequence) - (rows - 1 - row[half]) : 0;
    }
  }
};

template <int D>
__device__ void LoadQueries(const AttentionArgs& args, const AttendItem& item, bf16* q) {
  const int rows = args.Rows(item.sequence);
  constexpr int kPacks = D / 8;
  const int64_t stride = int64_t{args.heads + 2 * args.kv.num_kv_heads} * D;
  __syncwarp();
  for (int i = Lane(); i < kTileQueries * kPacks; i += kWarp) {
    const int query = item.tile * kTileQueries + i / kPacks, row = query / args.group;
    uint4 pack = make_uint4(0, 0, 0, 0);
    if (row < rows) {
      const int64_t t = args.FirstRow(item.sequence) + row;
      const int head = item.kv_head * args.group + query % args.group;
      pack = *reinterpret_cast<const uint4*>(args.qkv + t * stride + head * D + i % kPacks * 8);
    }
    *reinterpret_cast<uint4*>(q + i * 8) = pack;
  }
  __syncwarp();
}

template <int D>
__device__ __forceinline__ void AttendChunk(Chunk<D>& chunk, const AttentionArgs& args, const AttendItem& item,
                                            const TileRows& rows, const bf16* q, int index, int last_visible) {
  const int context = args.Context(item.sequence);
  const int begin = index * kChunkTokens / kBlockTokens;
  const int end =
      min((index + 1) * kChunkTokens / kBlockTokens, static_cast<int>(DivideUp(last_visible, kBlockTokens)));
  const int32_t* table = args.batch.block_table.data + item.sequence * args.batch.block_table.cols;
  const auto block_of = [&](int b) {
    const int64_t id = table[b];
    Require(id >= 0 && id < args.kv.num_blocks);
    return (id * args.kv.num_kv_heads + item.kv_head) * (kBlockTokens * D);
  };
  chunk.Clear();
  if (begin >= end) return;
  Keys<D> keys;
  int64_t at = block_of(begin);
  keys.Load(args.kv.k + at);
  for (int b = begin; b < end; ++b) {
    uint4 values[D / 8];
    const bf16* v = args.kv.v + at + Lane() / 4 * kBlockTokens + Lane() % 4 * 8;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) values[n] = __ldg(reinterpret_cast<const uint4*>(v + n * 8 * kBlockTokens));
    float scores[kPairs][4];
    Score<D>(scores, q, keys);
    if (b + 1 < end) {
      at = block_of(b + 1);
      keys.Load(args.kv.k + at);
    }
    const int first = b * kBlockTokens;
    const int seen[2] = {rows.visible[0] - first, rows.visible[1] - first};
    chunk.Soften(scores, seen, args.scale);
    chunk.Accumulate(scores, values, context - first);
  }
  chunk.Finish();
}

template <int D>
__device__ void StorePartial(const Chunk<D>& chunk, const AttentionArgs& args, const AttendItem& item,
                             const TileRows& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows.visible[half] == 0) continue;
    const int64_t at = (item.partial + rows.row[half]) * args.heads + rows.head[half];
    if (Lane() % 4 == 0) args.partial_max_sum[at] = make_float2(chunk.state[half].max, chunk.state[half].sum);
    float* const out = args.partial_out + at * D + Lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      *reinterpret_cast<float2*>(out + n * 8) = make_float2(chunk.out[n][2 * half], chunk.out[n][2 * half + 1]);
    }
  }
}

// total[i * kThreads + thread] is this thread's i-th output so far.
template <int D>
__device__ void CombineChunk(const Chunk<D>& chunk, MaxSum (&state)[2], float* total) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float keep_old, keep_new;
    state[half] = Combine(state[half], chunk.state[half], keep_old, keep_new);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        float& x = total[(n * 4 + e) * kThreads];
        x = CombineOut(x, keep_old, chunk.out[n][e], keep_new);
      }
    }
  }
}

template <int D>
__device__ void StoreOut(const AttentionArgs& args, const AttendItem& item, const TileRows& rows,
                         const MaxSum (&state)[2], const float* total) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows.visible[half] == 0) continue;
    const int64_t t = args.FirstRow(item.sequence) + rows.row[half];
    bf16* const out = args.out + (t * args.heads + rows.head[half]) * D + Lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float* x = total + (n * 4 + 2 * half) * kThreads;
      *reinterpret_cast<uint32_t*>(out + n * 8) =
          PackPair(__fdiv_rn(x[0], state[half].sum), __fdiv_rn(x[kThreads], state[half].sum));
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, 2) AttendKernel(AttentionArgs args) {
  AwaitInputs();
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ __align__(16) bf16 queries[kWarps][kTileQueries * D];
  float* const totals = reinterpret_cast<float*>(shared) + threadIdx.x;
  int32_t* const ends = reinterpret_cast<int32_t*>(shared + kThreads * D / 2 * sizeof(float));
  int32_t* const partials = ends + args.Sequences();
  const int64_t items = PlanItems<kThreads>(args, ends, partials);
  if (blockIdx.x == 0) {
    for (int s = static_cast<int>(threadIdx.x); s < args.Sequences(); s += kThreads)
      args.first_partial[s] = partials[s];
  }
  // Few items go to one block each; many go to blocks in runs, so that neighbours read the same K and V.
  const int64_t warp = threadIdx.x / kWarp, warps = int64_t{gridDim.x} * kWarps;
  const int64_t first = items <= warps ? warp * gridDim.x + blockIdx.x : int64_t{blockIdx.x} * kWarps + warp;
  bf16* const q = queries[warp];
  Chunk<D> chunk;
  for (int64_t i = first; i < items; i += warps) {
    const AttendItem item = FindItem(args, ends, partials, static_cast<int>(i));
    const TileRows rows(args, item);
    const int last_visible = WarpReduce(max(rows.visible[0], rows.visible[1]), [](int a, int b) { return max(a, b); });
    LoadQueries<D>(args, item, q);
    if (item.partial >= 0) {
      AttendChunk<D>(chunk, args, item, rows, q, item.first_chunk, last_visible);
      StorePartial<D>(chunk, args, item, rows);
      continue;
    }
    MaxSum state[2];
#pragma unroll
    for (int j = 0; j < D / 2; ++j) totals[j * kThreads] = 0;
    for (int c = 0; c * kChunkTokens < last_visible; ++c) {
      AttendChunk<D>(chunk, args, item, rows, q, c, last_visible);
      CombineChunk<D>(chunk, state, totals);
    }
    StoreOut<D>(args, item, rows, state, totals);
  }
}

// One warp per row and head; lane l has dims l, l + 32, ….
template <int D>
__global__ void CombineKernel(AttentionArgs args) {
  AwaitInputs();
  constexpr int kShare = (D + kWarp - 1) / kWarp;
  constexpr int kAtOnce = 8;  // chunks whose loads are under way together
  const int64_t t = blockIdx.x;
  if (t >= args.FirstRow(args.Sequences())) return;
  int low = 0, high = args.Sequences() - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (args.FirstRow(middle + 1) > t) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int64_t partial = args.first_partial[low];
  if (partial < 0) return;
  const int rows = args.Rows(low), row = static_cast<int>(t) - args.FirstRow(low);
  const int visible = args.Context(low) - (rows - 1 - row);
  for (int h = static_cast<int>(threadIdx.x) / kWarp; h < args.heads; h += static_cast<int>(blockDim.x) / kWarp) {
    MaxSum state;
    float total[kShare] = {};
    const int chunks = static_cast<int>(DivideUp(visible, kChunkTokens));
    for (int begin = 0; begin < chunks; begin += kAtOnce) {
      float2 max_sum[kAtOnce];
      float part[kAtOnce][kShare];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (begin + j >= chunks) continue;
        const int64_t at = (partial + int64_t{begin + j} * rows + row) * args.heads + h;
        max_sum[j] = args.partial_max_sum[at];
#pragma unroll
        for (int i = 0; i < kShare; ++i)
          part[j][i] = Lane() + i * kWarp < D ? args.partial_out[at * D + Lane() + i * kWarp] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (begin + j >= chunks) continue;
        float keep_old, keep_new;
        state = Combine(state, MaxSum{max_sum[j].x, max_sum[j].y}, keep_old, keep_new);
#pragma unroll
        for (int i = 0; i < kShare; ++i) total[i] = CombineOut(total[i], keep_old, part[j][i], keep_new);
      }
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int d = Lane() + i * kWarp;
      if (d < D) args.out[(t * args.heads + h) * D + d] = Round(__fdiv_rn(total[i], state.sum));
    }
  }
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

constexpr int64_t kLeastPartials = 4096;
constexpr size_t kPlanBytes = kMaxSequences * sizeof(int32_t);

size_t PartialBytes(int64_t heads, int64_t dim) {
  return static_cast<size_t>(heads) * (static_cast<size_t>(dim) * sizeof(float) + sizeof(float2));
}

template <int D>
void LaunchAttention(const AttentionArgs& args, int64_t rows, Stream& stream) {
  const size_t sequences = static_cast<size_t>(args.batch.context_len.size);
  const size_t shared_bytes = kThreads * D / 2 * sizeof(float) + 2 * sequences * sizeof(int32_t);
  Launch(stream, AttendKernel<D>, Grid(2 * StateOf(stream).num_sms), kThreads, shared_bytes, args);
  Launch(stream, CombineKernel<D>, Grid(rows), 256, 0, args);
}

}  // namespace

size_t PagedAttentionWorkspaceBytes(int64_t max_context, int num_heads, int head_dim) {
  return kPlanBytes +
         static_cast<size_t>(kLeastPartials + DivideUp(max_context, kChunkTokens)) * PartialBytes(num_heads, head_dim);
}

void PagedAttention(Mat<bf16> out, Mat<const bf16> qkv, KvLayer<bf16> kv, const AttentionBatch& batch, float scale,
                    Stream& stream) {
  if (out.rows == 0 || batch.context_len.size == 0) return;
  MILLRACE_CHECK(batch.context_len.size <= kMaxSequences, "the plan has room for the sequences",
                 batch.context_len.size);
  const int heads = static_cast<int>(out.cols / kv.head_dim);
  std::byte* const workspace = stream.workspace();
  const int64_t max_partials =
      static_cast<int64_t>((stream.workspace_bytes() - kPlanBytes) / PartialBytes(heads, kv.head_dim));
  float* const partial_out = reinterpret_cast<float*>(workspace + kPlanBytes);
  const AttentionArgs args{qkv.data,
                           out.data,
                           kv,
                           batch,
                           heads,
                           heads / kv.num_kv_heads,
                           scale * 1.44269504088896341f,
                           max_partials,
                           reinterpret_cast<int32_t*>(workspace),
                           partial_out,
                           reinterpret_cast<float2*>(partial_out + max_partials * heads * kv.head_dim)};
  switch (kv.head_dim) {
    case 16:
      return LaunchAttention<16>(args, out.rows, stream);
    case 32:
      return LaunchAttention<32>(args, out.rows, stream);
    case 48:
      return LaunchAttention<48>(args, out.rows, stream);
    case 64:
      return LaunchAttention<64>(args, out.rows, stream);
    case 96:
      return LaunchAttention<96>(args, out.rows, stream);
    case 128:
      return LaunchAttention<128>(args, out.rows, stream);
    default:
      MILLRACE_CHECK(false, "attention has a kernel for the head's size", kv.head_dim);
  }
}

}  // namespace millrace::cuda
