// out[t, h] = sum over s of softmax_s(scale * q[t, h] . k[s]) * v[s] for sequences of many rows (prefill).
// A block is two warpgroups that compute and a warp that feeds them. It owns 128 queries (rows times heads of a group)
// of one kv head, 64 for each warpgroup, and walks the chunks that they see: K and V of 128 tokens come in bulk to a
// ring in shared memory, q . k goes by wgmma into 64 registers a thread, weights stay in registers as the other
// product's left side, p . v goes to D / 2 registers and is combined with D / 2 totals. The
// tensor cores serve the warpgroups in turns, so that one softens its scores while the other multiplies. Blocks take
// tiles one by one, those that see most first, and the feeding warp is a tile ahead. Bound: 4 D FLOPs per query and
// token. H200, 2026-11-30, share of 790 TFLOP/s: prompts of 2048 rows, 32 heads, 8 kv heads of 128: one 45 %, four 48
// %; 14, 2 of 64: four 33 %; 1024 rows, 16, 8 of 128: four 31 %.
#include "kernels/check.h"
#include "kernels/cuda/attention_plan.cuh"
#include "kernels/cuda/attention_products.cuh"
#include "kernels/cuda/attention_ring.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr int kComputing = 2 * kWarpgroup;
constexpr int kThreads = kComputing + kWarpgroup;  // of the last warpgroup one warp works
constexpr int kWarpgroupQueries = 64;
constexpr int kTile = 2 * kWarpgroupQueries;
constexpr int kSlots = 4;
constexpr int kColumnTiles = kChunkTokens / 8;

// A slot holds K or V of one chunk, [segment][token of the chunk][dim of the segment].
template <int D>
constexpr int kSlotBytes = kChunkTokens* D * 2;
constexpr int kSegmentBytes = kChunkTokens * 128;
using TileRing = Ring<2, static_cast<int>(sizeof(Tile))>;
template <int D>
using ChunkRing = Ring<kSlots, kSlotBytes<D>>;

template <int D>
struct Shared {
  static constexpr int kQueries = ChunkRing<D>::kBytes;  // [segment][query][dim], swizzled
  static constexpr int kQueriesSegment = kTile * 128;
  static constexpr int kBarriers = kQueries + kTile * D * 2;
  static constexpr int kTiles = kBarriers + ChunkRing<D>::kBarrierBytes;
  static constexpr int kTileBarriers = kTiles + TileRing::kBytes;
  static constexpr int kEnds = kTileBarriers + TileRing::kBarrierBytes;  // of sequences, in tiles
  // With room to align.
  static constexpr size_t Bytes(int64_t sequences) {
    return kEnds + sizeof(int) * static_cast<size_t>(sequences) + 1024;
  }
};

__device__ __forceinline__ void SyncWarpgroup() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + static_cast<int>(threadIdx.x) / kWarpgroup), "n"(kWarpgroup) : "memory");
}
// The tensor cores serve one warpgroup at a time, while the other one softens scores.
__device__ __forceinline__ void TakeTurn(int warpgroup) {
  asm volatile("bar.sync %0, %1;" ::"r"(3 + warpgroup), "n"(kComputing) : "memory");
}
__device__ __forceinline__ void GiveTurn(int warpgroup) {
  asm volatile("bar.arrive %0, %1;" ::"r"(3 + warpgroup), "n"(kComputing) : "memory");
}
// Ordinary writes to shared memory come before what the tensor cores read next.
__device__ __forceinline__ void ShowToProducts() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  SyncWarpgroup();
}

template <int D>
__device__ __forceinline__ void LoadQueries(const AttentionArgs& args, const Tile& tile, uint32_t to, int first) {
  for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < kWarpgroupQueries * D / 8; i += kWarpgroup) {
    const int query = first + i / (D / 8), pack = i % (D / 8);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (query < tile.queries) x = *reinterpret_cast<const uint4*>(tile.Query(args, query) + pack * 8);
    const uint32_t at =
        to + static_cast<uint32_t>(pack / 8 * Shared<D>::kQueriesSegment + query * 128 + ((pack ^ query) & 7) * 16);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
  ShowToProducts();
}

// Slots of values beyond the chunk's tokens hold anything; zero weights need finite values.
template <int D>
__device__ __forceinline__ void ClearBeyond(uint32_t values, int tokens) {
  constexpr int kRowPacks = 8;
  for (int i = static_cast<int>(threadIdx.x) % kWarpgroup; i < (kChunkTokens - tokens) * D / 8; i += kWarpgroup) {
    const int row = i / kRowPacks, segment = row / (kChunkTokens - tokens);
    const uint32_t at =
        values + static_cast<uint32_t>(segment * kSegmentBytes + (tokens + row % (kChunkTokens - tokens)) * 128 +
                                       i % kRowPacks * 16);
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  ShowToProducts();
}

// Scores become weights, in place; visible[half] of the chunk's tokens are seen, `masked` where some are not.
__device__ __forceinline__ void SoftenScores(float (&scores)[4 * kColumnTiles], MaxSum (&state)[2],
                                             const int (&visible)[2], bool masked, float scale) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = -INFINITY;
    if (masked) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = scores[4 * j + 2 * half + e];
          s = j * 8 + t * 2 + e < visible[half] ? s : -INFINITY;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      max = fmaxf(max, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
    }
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
    state[half].max = max * scale;
    const float base = Base(state[half].max);
    float sums[kChunkBlocks];
#pragma unroll
    for (int b = 0; b < kChunkBlocks; ++b) {
      sums[b] = 0;
#pragma unroll
      for (int j = b * (kBlockTokens / 8); j < (b + 1) * (kBlockTokens / 8); ++j) {
        float& x = scores[4 * j + 2 * half];
        float& y = scores[4 * j + 2 * half + 1];
        x = Soften(x, scale, base);
        y = Soften(y, scale, base);
        sums[b] = (sums[b] + x) + y;
      }
    }
    float sum = ((sums[0] + sums[1]) + sums[2]) + sums[3];
    sum += __shfl_xor_sync(~0u, sum, 1);
    state[half].sum = sum + __shfl_xor_sync(~0u, sum, 2);
  }
}

template <int D>
__device__ __forceinline__ void StoreOut(const AttentionArgs& args, const Tile& tile, int query,
                                         const MaxSum (&state)[2], const float (&total)[D / 2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (query + half * 8 >= tile.queries) continue;
    bf16* const out = tile.Out(args, query + half * 8) + threadIdx.x % 4 * 2;
    const float scale = __frcp_rn(state[half].sum);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      *reinterpret_cast<uint32_t*>(out + n * 8) =
          PackPair(total[4 * n + 2 * half] * scale, total[4 * n + 2 * half + 1] * scale);
    }
  }
}

// scores = q . k; under way when it returns.
template <int D>
__device__ __forceinline__ void StartScores(float (&scores)[4 * kColumnTiles], uint32_t queries, uint32_t keys) {
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    MultiplyWarpgroup(scores,
                      Descriptor(queries + static_cast<uint32_t>(i / 4 * Shared<D>::kQueriesSegment + i % 4 * 32)),
                      Descriptor(keys + static_cast<uint32_t>(i / 4 * kSegmentBytes + i % 4 * 32)), i != 0 ? 1 : 0);
  }
  CommitWarpgroup();
}
// out = p . v; under way when it returns.
template <int D>
__device__ __forceinline__ void StartOut(float (&out)[D / 2], const uint32_t (&weights)[kChunkTokens / 16][4],
                                         uint32_t values) {
#pragma unroll
  for (int step = 0; step < kChunkTokens / 16; ++step) {
    MultiplyWeights(out, weights[step], Descriptor(values + static_cast<uint32_t>(step * 2048), kSegmentBytes),
                    step != 0 ? 1 : 0);
  }
  CommitWarpgroup();
}

template <int D>
__device__ __forceinline__ void Add(float (&total)[D / 2], MaxSum (&state)[2], const float (&out)[D / 2],
                                    const MaxSum (&chunk_state)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float keep_old, keep_new;
    state[half] = Combine(state[half], chunk_state[half], keep_old, keep_new);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        total[4 * n + e] = CombineOut(total[4 * n + e], keep_old, out[4 * n + e], keep_new);
      }
    }
  }
}

template <int D>
__device__ __forceinline__ void GiveBack(ChunkRing<D>& ring) {
  if (threadIdx.x % kWarp == 0) Arrive(ring.Empty());
  ring.Advance();
}

// The computing warpgroups: in its turn one weighs the values of the chunk before and scores this one's keys.
template <int D>
__device__ __forceinline__ void Attend(const AttentionArgs& args, const Tile& tile, ChunkRing<D>& ring,
                                       uint32_t shared) {
  // The same for the whole warp, and known to be.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int first = warpgroup * kWarpgroupQueries;
  const int query =
      first + static_cast<int>(threadIdx.x) % kWarpgroup / kWarp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4;
  const uint32_t all_queries = shared + static_cast<uint32_t>(Shared<D>::kQueries);
  const uint32_t queries = all_queries + static_cast<uint32_t>(first * 128);
  LoadQueries<D>(args, tile, all_queries, first);
  const int seen[2] = {tile.Visible(args, query), tile.Visible(args, query + 8)};
  const int least = first + kWarpgroupQueries <= tile.queries ? tile.Visible(args, first) : 0;
  const int most = tile.Visible(args, min(first + kWarpgroupQueries, max(tile.queries, first + 1)) - 1);
  const int chunks = tile.Chunks(), own = __shfl_sync(~0u, (most + kChunkTokens - 1) / kChunkTokens, 0);
  const auto end_turn = [&] { GiveTurn(1 - warpgroup); };

  if (own > 0) {
    float total[D / 2], out[D / 2], scores[4 * kColumnTiles];
    uint32_t weights[kChunkTokens / 16][4];
    MaxSum state[2], chunk_state[2];
    const auto soften = [&](int c) {
      const int begin = c * kChunkTokens, visible[2] = {seen[0] - begin, seen[1] - begin};
      SoftenScores(scores, chunk_state, visible, begin + kChunkTokens > least, args.scale);
#pragma unroll
      for (int step = 0; step < kChunkTokens / 16; ++step) {
#pragma unroll
        for (int e = 0; e < 4; ++e) weights[step][e] = PackPair(scores[8 * step + 2 * e], scores[8 * step + 2 * e + 1]);
      }
    };
#pragma unroll
    for (int i = 0; i < D / 2; ++i) total[i] = 0;
    ring.AwaitFull();
    TakeTurn(warpgroup);
    FenceWarpgroup();
    StartScores<D>(scores, queries, ring.Buffer());
    WaitWarpgroup<0>();
    end_turn();
    Reread(scores);
    GiveBack<D>(ring);
    soften(0);
    for (int c = 1; c < own; ++c) {
      ring.AwaitFull();
      ring.Ahead(1).AwaitFull();
      TakeTurn(warpgroup);
      FenceWarpgroup();
      StartOut<D>(out, weights, ring.Buffer());
      WaitWarpgroup<0>();
      Reread(out);
      GiveBack<D>(ring);
      FenceWarpgroup();
      StartScores<D>(scores, queries, ring.Buffer());
      Add<D>(total, state, out, chunk_state);
      WaitWarpgroup<0>();
      end_turn();
      Reread(scores);
      GiveBack<D>(ring);
      soften(c);
    }
    ring.AwaitFull();
    const int left = tile.limit - (own - 1) * kChunkTokens;
    if (left < kChunkTokens) ClearBeyond<D>(ring.Buffer(), left);
    TakeTurn(warpgroup);
    FenceWarpgroup();
    StartOut<D>(out, weights, ring.Buffer());
    WaitWarpgroup<0>();
    end_turn();
    Reread(out);
    GiveBack<D>(ring);
    Add<D>(total, state, out, chunk_state);
    StoreOut<D>(args, tile, query, state, total);
  } else {
    TakeTurn(warpgroup);
    end_turn();
  }
  // What only the other warpgroup sees.
  for (int c = own + 1; c <= chunks; ++c) {
    for (int part = 0; part < 2; ++part) {
      ring.AwaitFull();
      GiveBack<D>(ring);
    }
    TakeTurn(warpgroup);
    end_turn();
  }
}

// The feeding warp: K and V of chunk after chunk; lane l brings segment l / 4 of block l % 4.
template <int D>
__device__ __forceinline__ void Feed(const AttentionArgs& args, const Tile& tile, ChunkRing<D>& ring) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, segment = lane / kChunkBlocks;
  const int first = lane % kChunkBlocks * kBlockTokens;
  for (int c = 0; c < tile.Chunks(); ++c) {
    const int tokens = min(tile.limit - c * kChunkTokens, kChunkTokens), mine = min(tokens - first, kBlockTokens);
    const bool brings = segment < D / 64 && mine > 0;
    const int64_t from = brings ? args.Block(tile.sequence, tile.kv_head, c * kChunkBlocks + first / kBlockTokens) +
                                      segment * (kBlockTokens * 64)
                                : 0;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      ring.AwaitEmpty();
      if (lane == 0) ArriveExpecting(ring.Full(), static_cast<uint32_t>(tokens * D * 2));
      __syncwarp();
      if (brings) {
        BulkCopy(ring.Buffer() + static_cast<uint32_t>(segment * kSegmentBytes + first * 128),
                 (part == 0 ? args.kv.k : args.kv.v) + from, static_cast<uint32_t>(mine * 128), ring.Full());
      }
      ring.Advance();
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, 1) ManyQueriesKernel(AttentionArgs args) {
  extern __shared__ uint8_t raw[];
  uint8_t* const base = raw + (-SharedAddress(raw) & 1023u);
  const uint32_t shared = SharedAddress(base);
  ChunkRing<D> ring{shared, shared + static_cast<uint32_t>(Shared<D>::kBarriers)};
  TileRing tile_ring{shared + static_cast<uint32_t>(Shared<D>::kTiles),
                     shared + static_cast<uint32_t>(Shared<D>::kTileBarriers)};
  Tile* const tiles = reinterpret_cast<Tile*>(base + Shared<D>::kTiles);
  if (threadIdx.x == 0) {
    ring.Init(kComputing / kWarp);
    tile_ring.Init(kComputing / kWarp);
  }
  AwaitInputs();
  __syncthreads();
  if (threadIdx.x >= kComputing) {
    const bool feeds = threadIdx.x < kComputing + kWarp;
    int* const ends = reinterpret_cast<int*>(base + Shared<D>::kEnds);
    int count = 0;
    if (feeds) {
      count = ScanSequences(args, ends, [&](int s) {
        const int queries = args.Rows(s) * args.group;
        return queries >= args.many_queries ? (queries + kTile - 1) / kTile : 0;
      });
    }
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (!feeds) return;
    const int heads = args.kv.num_kv_heads;
    for (;;) {
      const int number = TakeNumber(args.counters, count * heads);
      const bool more = number < count * heads;
      Tile tile;
      if (more) {
        int start;
        const int place = count - 1 - number / heads, sequence = FindSequence(args, ends, place, start);
        tile = Tile(args, sequence, number % heads, (place - start) * kTile, kTile);
      } else {
        tile.queries = 0;
      }
      tile_ring.AwaitEmpty();
      if (threadIdx.x % kWarp == 0) {
        tiles[tile_ring.index] = tile;
        Arrive(tile_ring.Full());
      }
      __syncwarp();
      tile_ring.Advance();
      if (!more) return;
      Feed<D>(args, tile, ring);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    if (threadIdx.x >= kWarpgroup) GiveTurn(0);
    for (;;) {
      tile_ring.AwaitFull();
      const Tile tile = tiles[tile_ring.index];
      __syncwarp();
      if (threadIdx.x % kWarp == 0) Arrive(tile_ring.Empty());
      tile_ring.Advance();
      if (tile.queries == 0) return;
      Attend<D>(args, tile, ring, shared);
    }
  }
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

template <int D>
void LaunchManyQueries(const AttentionArgs& args, Stream& stream) {
  Launch(stream, ManyQueriesKernel<D>, Grid(StateOf(stream).num_sms), kThreads,
         Shared<D>::Bytes(args.batch.context_len.size), args);
}

}  // namespace

void AttendManyQueries(const AttentionArgs& args, Stream& stream) {
  args.kv.head_dim == 64 ? LaunchManyQueries<64>(args, stream) : LaunchManyQueries<128>(args, stream);
}

}  // namespace millrace::cuda
