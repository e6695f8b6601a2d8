// What a block of the kernels for few queries does: four warps compute and one feeds them, K and V of 128 tokens at a
// time, by bulk copies to a ring in shared memory. The four share every chunk of a tile of at most 16 queries, the
// 16-row side of mma.sync: warp w computes the scores of block w of the chunk's four, the largest is found in shared
// memory, weights pass through it as bf16, and warp w computes its dims of p . v (16 at a time: pairs w, w + 4, …) over
// all tokens. Thread 4 g + t holds rows g and g + 8.
#pragma once

#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/attention_ring.cuh"

namespace millrace::cuda {

constexpr int kWarps = 4;  // that compute, one for each block of a chunk
constexpr int kComputing = kWarps * kWarp;
constexpr int kThreads = kComputing + kWarp;
constexpr int kBlockTiles = kBlockTokens / 8;           // tiles of eight tokens in a block
constexpr int kWeightsStride = (kChunkTokens + 8) * 2;  // bytes of a row of weights, in other banks than the next
static_assert(kWarps == kChunkBlocks);

__device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int Warp() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ __forceinline__ void SyncComputing() { asm volatile("bar.sync 1, %0;" ::"n"(kComputing) : "memory"); }
__device__ __forceinline__ void LoadTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// A slot holds K or V of a block as they lie in the cache.
template <int D>
constexpr int kSlotBytes = kBlockTokens* D * 2;
// Of 16-byte pack `pack` of a token.
template <int D>
__device__ __forceinline__ uint32_t SlotOffset(int token, int pack) {
  return static_cast<uint32_t>(CacheOffset(D, token, pack * 8) * 2);
}

// Blocks that a multiprocessor holds at once, and so many bytes of ring in each.
template <int D>
constexpr int kBlocksPerSm = D > 64 ? 2 : 3;
template <int D>
constexpr int kRingBytes = (D > 64 ? 80 : 48) * 1024;

template <int D>
struct Shared {
  static constexpr int kMostSlots = kRingBytes<D> / kSlotBytes<D>;
  using Slots = Ring < kMostSlots<32 ? kMostSlots : 32, kSlotBytes<D>>;
  using Queries = Ring<2, kTileQueries * D * 2>;
  static constexpr int kQueries = Slots::kBytes;
  static constexpr int kWeights = kQueries + Queries::kBytes;
  static constexpr int kMaxima = kWeights + kTileQueries * kWeightsStride;  // [warp][row]
  static constexpr int kSums = kMaxima + kWarps * kTileQueries * 4;         // [warp][row][t]
  static constexpr int kBarriers = kSums + kWarps * kTileQueries * 4 * 4;
  static constexpr int kQueryBarriers = kBarriers + Slots::kBarrierBytes;
  static constexpr int kSpans = kQueryBarriers + Queries::kBarrierBytes;
  static constexpr int kEnds = kSpans + 2 * static_cast<int>(sizeof(Span));  // of the plan
  // With room to align.
  static constexpr size_t Bytes(int64_t sequences) {
    return kEnds + sizeof(int) * static_cast<size_t>(sequences) + 1024;
  }

  uint8_t* base;
  Slots slots;
  Queries queries;

  __device__ Shared() {
    extern __shared__ uint8_t raw[];
    base = raw + (-SharedAddress(raw) & 1023u);
    const uint32_t at = SharedAddress(base);
    slots = {at, at + kBarriers};
    queries = {at + kQueries, at + kQueryBarriers};
  }
  __device__ uint8_t* Weights() const { return base + kWeights; }
  __device__ float* Maxima() const { return reinterpret_cast<float*>(base + kMaxima); }
  __device__ float* Sums() const { return reinterpret_cast<float*>(base + kSums); }
  __device__ int* Ends() const { return reinterpret_cast<int*>(base + kEnds); }
  // The span that comes with the current place for queries.
  __device__ Span& QueriesSpan() const { return reinterpret_cast<Span*>(base + kSpans)[queries.index]; }
};

// A tile's results so far, of this warp's dims.
template <int D>
struct Result {
  static constexpr int kPairs = (D / 16 + kWarps - 1) / kWarps;
  float out[kPairs][2][4];
  MaxSum state[2];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
#pragma unroll
      for (int e = 0; e < 8; ++e) out[p][e / 4][e % 4] = 0;
    }
    state[0] = state[1] = MaxSum{};
  }
  __device__ __forceinline__ void Add(const Result& chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float keep_old, keep_new;
      state[half] = Combine(state[half], chunk.state[half], keep_old, keep_new);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = out[p][e / 2][2 * half + e % 2];
          x = CombineOut(x, keep_old, chunk.out[p][e / 2][2 * half + e % 2], keep_new);
        }
      }
    }
  }
  // fn(dim, half, value of dim, value of dim + 1) for this thread's share.
  template <class Fn>
  __device__ __forceinline__ void ForEach(const Fn& fn) const {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const int pair = Warp() + p * kWarps;
      if (D / 16 % kWarps != 0 && pair >= D / 16) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int dim = pair * 16 + e / 2 * 8 + Lane() % 4 * 2, half = e % 2;
        fn(dim, half, out[p][e / 2][2 * half], out[p][e / 2][2 * half + 1]);
      }
    }
  }
};

// A tile's queries, row after row, as the left side of products.
template <int D>
__device__ __forceinline__ void LoadQueries(uint32_t (&q)[D / 16][4], uint32_t queries) {
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    LoadMatrices(q[i], queries + static_cast<uint32_t>(Lane() % 16 * D * 2 + Lane() / 16 * 16 + i * 32));
  }
}

// scores[j] = q . k for the tokens 8 j + 2 t and + 1 of this warp's block.
template <int D>
__device__ __forceinline__ void Score(float (&scores)[kBlockTiles][4], const uint32_t (&q)[D / 16][4], uint32_t keys) {
#pragma unroll
  for (int j = 0; j < kBlockTiles; ++j) scores[j][0] = scores[j][1] = scores[j][2] = scores[j][3] = 0;
  const int token = Lane() / 16 * 8 + Lane() % 8, pack = Lane() / 8 % 2;
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kBlockTiles; j += 2) {
      uint32_t b[4];
      LoadMatrices(b, keys + SlotOffset<D>(token + j * 8, 2 * i + pack));
      Multiply(scores[j], q[i][0], q[i][1], q[i][2], q[i][3], b[0], b[1]);
      Multiply(scores[j + 1], q[i][0], q[i][1], q[i][2], q[i][3], b[2], b[3]);
    }
  }
}

// Tokens at and beyond `left` of the sixteen hold nothing and count as zeros.
__device__ __forceinline__ void ClearBeyond(uint32_t (&b)[4], int left) {
  const int own = left - Lane() % 4 * 2;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int here = own - e % 2 * 8;
    b[e] = here >= 2 ? b[e] : here == 1 ? b[e] & 0xffffu : 0u;
  }
}

// out += p . v of this warp's dims over sixteen tokens, of which `left` hold something.
template <int D, bool kAll>
__device__ __forceinline__ void Weigh(Result<D>& chunk, uint32_t weights, uint32_t values, int step, int left) {
  uint32_t a[4];
  LoadMatrices(a, weights + static_cast<uint32_t>(Lane() % 16 * kWeightsStride + Lane() / 16 * 16 + step * 32));
#pragma unroll
  for (int p = 0; p < Result<D>::kPairs; ++p) {
    const int pair = Warp() + p * kWarps;
    if (D / 16 % kWarps != 0 && pair >= D / 16) continue;
    uint32_t b[4];
    LoadTransposed(b, values + SlotOffset<D>(step % 2 * 16 + Lane() % 16, pair * 2 + Lane() / 16));
    if (!kAll && left < 16) ClearBeyond(b, left);
    Multiply(chunk.out[p][0], a[0], a[1], a[2], a[3], b[0], b[1]);
    Multiply(chunk.out[p][1], a[0], a[1], a[2], a[3], b[2], b[3]);
  }
}

// One chunk of a tile; `visible[half]` of its tokens are seen by this thread's rows, `tokens` by any.
template <int D>
__device__ __forceinline__ void AttendChunk(Result<D>& chunk, Shared<D>& shared, const uint32_t (&q)[D / 16][4],
                                            const int (&visible)[2], int tokens, float scale) {
  const int g = Lane() / 4, t = Lane() % 4, first = Warp() * kBlockTokens;
  const int blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
  float scores[kBlockTiles][4];
  float max[2] = {-INFINITY, -INFINITY};
  if (Warp() < blocks) {
    const auto keys = shared.slots.Ahead(Warp());
    keys.AwaitFull();
    Score<D>(scores, q, keys.Buffer());
    __syncwarp();
    if (Lane() == 0) Arrive(keys.Empty(), kWarps);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kBlockTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = scores[j][2 * half + e];
          s = first + j * 8 + t * 2 + e < visible[half] ? s : -INFINITY;
          max[half] = fmaxf(max[half], s);
        }
      }
      max[half] = fmaxf(max[half], __shfl_xor_sync(~0u, max[half], 1));
      max[half] = fmaxf(max[half], __shfl_xor_sync(~0u, max[half], 2));
    }
  }
  shared.slots.Advance(blocks);
  float* const maxima = shared.Maxima();
  float* const sums = shared.Sums();
  if (t == 0) {
    maxima[Warp() * kTileQueries + g] = max[0];
    maxima[Warp() * kTileQueries + g + 8] = max[1];
  }
  SyncComputing();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = g + half * 8;
    max[half] = fmaxf(fmaxf(maxima[row], maxima[kTileQueries + row]),
                      fmaxf(maxima[2 * kTileQueries + row], maxima[3 * kTileQueries + row]));
    chunk.state[half].max = max[half] * scale;
    float sum = 0;
    if (Warp() < blocks) {
      const float base = Base(chunk.state[half].max);
      uint8_t* const to = shared.Weights() + row * kWeightsStride + (first + t * 2) * 2;
#pragma unroll
      for (int j = 0; j < kBlockTiles; ++j) {
        const float a = Soften(scores[j][2 * half], scale, base), b = Soften(scores[j][2 * half + 1], scale, base);
        sum = (sum + a) + b;
        *reinterpret_cast<uint32_t*>(to + j * 16) = PackPair(a, b);
      }
    }
    sums[(Warp() * kTileQueries + row) * 4 + t] = sum;
  }
  SyncComputing();
#pragma unroll
  for (int p = 0; p < Result<D>::kPairs; ++p) {
#pragma unroll
    for (int e = 0; e < 8; ++e) chunk.out[p][e / 4][e % 4] = 0;
  }
  const uint32_t weights = SharedAddress(shared.Weights());
  if (tokens == kChunkTokens) {
    uint32_t values[kChunkBlocks];
#pragma unroll
    for (int b = 0; b < kChunkBlocks; ++b) {
      const auto slot = shared.slots.Ahead(b);
      slot.AwaitFull();
      values[b] = slot.Buffer();
    }
#pragma unroll
    for (int step = 0; step < kChunkTokens / 16; ++step) Weigh<D, true>(chunk, weights, values[step / 2], step, 16);
  } else {
    for (int step = 0; step * 16 < tokens; ++step) {
      const auto slot = shared.slots.Ahead(step / 2);
      slot.AwaitFull();
      Weigh<D, false>(chunk, weights, slot.Buffer(), step, tokens - step * 16);
    }
  }
  __syncwarp();
  if (Lane() < blocks) Arrive(shared.slots.Ahead(Lane()).Empty());
  shared.slots.Advance(blocks);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const mine = sums + (g + half * 8) * 4 + t;
    constexpr int kStride = kTileQueries * 4;
    float sum = ((mine[0] + mine[kStride]) + mine[2 * kStride]) + mine[3 * kStride];
    sum += __shfl_xor_sync(~0u, sum, 1);
    chunk.state[half].sum = sum + __shfl_xor_sync(~0u, sum, 2);
  }
}

template <int D>
__device__ __forceinline__ void StoreSlot(const Result<D>& result, const AttentionArgs& args, const Tile& tile,
                                          int64_t slot) {
  const int g = Lane() / 4;
  result.ForEach([&](int dim, int half, float a, float b) {
    if (g + half * 8 >= tile.queries) return;
    float* const to = args.slot_out + (slot * args.tile_queries + g + half * 8) * D + dim;
    *reinterpret_cast<float2*>(to) = make_float2(a, b);
  });
  if (threadIdx.x < kWarp && Lane() % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (g + half * 8 >= tile.queries) continue;
      args.slot_states[slot * args.tile_queries + g + half * 8] =
          make_float2(result.state[half].max, result.state[half].sum);
    }
  }
}

template <int D>
__device__ __forceinline__ void StoreOut(const Result<D>& result, const AttentionArgs& args, const Tile& tile) {
  bf16* rows[2];
  float scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = Lane() / 4 + half * 8;
    rows[half] = query < tile.queries ? tile.Out(args, query) : nullptr;
    scales[half] = __frcp_rn(result.state[half].sum);
  }
  result.ForEach([&](int dim, int half, float a, float b) {
    bf16* const to = half == 0 ? rows[0] : rows[1];
    const float scale = half == 0 ? scales[0] : scales[1];
    if (to != nullptr) *reinterpret_cast<uint32_t*>(to + dim) = PackPair(a * scale, b * scale);
  });
}

}  // namespace millrace::cuda
