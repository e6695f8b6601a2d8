// out[h] = sum over s of softmax_s(scale * q[h] . k[s]) * v[s] for one sequence of one row (decode without company).
// Latency is all there is, so nothing is planned: a cluster of eight blocks serves a kv head and divides its chunks
// evenly. What a block's warps do with a chunk is in attention_block.cuh; lanes of the feeding warp each bring a block
// of K, then of V, and read the first ids beside the context's length. Where no block has more than a chunk, results go
// straight to the first block's shared memory and count their bytes at a barrier there; else to the workspace, and the
// cluster meets. The first block combines them in order. Bound: bytes, 4 D per token and kv head.
#include "kernels/cuda/attention_block.cuh"
#include "kernels/cuda/attention_slots.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kCluster = 8;

__device__ __forceinline__ uint32_t AddressAt(uint32_t address, uint32_t block) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}
// Both addresses are another block's, whose barrier counts the bytes.
__device__ __forceinline__ void StorePairCounted(uint32_t address, float a, float b, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(a), "f"(b), "r"(barrier)
               : "memory");
}

// The first block's results of each block's one chunk: a barrier, then [chunk][query][dim], then MaxSum
// [chunk][query].
template <int D>
struct Results {
  uint8_t* base;
  int queries;

  static constexpr int kOffset = (Shared<D>::kEnds + 15) / 16 * 16;
  static constexpr int kOuts = 16;
  static constexpr int kQueryBytes = D * 4 + 8;
  static size_t Bytes(int queries) { return static_cast<size_t>(16 + kOuts + kCluster * queries * kQueryBytes); }

  __device__ uint32_t Barrier() const { return SharedAddress(base); }
  __device__ int Out(int chunk, int query) const { return kOuts + (chunk * queries + query) * D * 4; }
  __device__ int State(int chunk, int query) const { return Out(kCluster, 0) + (chunk * queries + query) * 8; }

  __device__ __forceinline__ void Store(const Result<D>& result, int chunk) const {
    const uint32_t first = AddressAt(Barrier(), 0);
    const int g = Lane() / 4;
    result.ForEach([&](int dim, int half, float a, float b) {
      if (g + half * 8 >= queries) return;
      StorePairCounted(first + static_cast<uint32_t>(Out(chunk, g + half * 8) + dim * 4), a, b, first);
    });
    if (threadIdx.x >= kWarp || Lane() % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (g + half * 8 >= queries) continue;
      StorePairCounted(first + static_cast<uint32_t>(State(chunk, g + half * 8)), result.state[half].max,
                       result.state[half].sum, first);
    }
  }
  __device__ __forceinline__ void Combine(const AttentionArgs& args, const Tile& tile, int chunks) const {
    if (threadIdx.x == 0) ArriveExpecting(Barrier(), static_cast<uint32_t>(chunks * queries * kQueryBytes));
    WaitBarrier(Barrier(), 0);
    for (int i = static_cast<int>(threadIdx.x); i < queries * (D / 2); i += kComputing) {
      const int query = i / (D / 2), dim = i % (D / 2) * 2;
      float2 outs[kCluster], states[kCluster];
#pragma unroll
      for (int c = 0; c < kCluster; ++c) {
        outs[c] = states[c] = make_float2(0, 0);
        if (c >= chunks) continue;
        outs[c] = *reinterpret_cast<const float2*>(base + Out(c, query) + dim * 4);
        states[c] = *reinterpret_cast<const float2*>(base + State(c, query));
      }
      MaxSum state;
      float a = 0, b = 0;
#pragma unroll
      for (int c = 0; c < kCluster; ++c) {
        if (c >= chunks) continue;
        float keep_old, keep_new;
        state = cuda::Combine(state, MaxSum{states[c].x, states[c].y}, keep_old, keep_new);
        a = CombineOut(a, keep_old, outs[c].x, keep_new);
        b = CombineOut(b, keep_old, outs[c].y, keep_new);
      }
      const float scale = __frcp_rn(state.sum);
      *reinterpret_cast<uint32_t*>(tile.Out(args, query) + dim) = PackPair(a * scale, b * scale);
    }
  }
};

__device__ __forceinline__ int64_t IdOf(const AttentionArgs& args, int index) {
  return Lane() < kChunkBlocks && index < args.batch.block_table.cols ? args.batch.block_table.data[index] : 0;
}

// The feeding warp; `id` is that of this lane's block of the first chunk.
template <int D>
__device__ __forceinline__ void Feed(const AttentionArgs& args, const Span& span, int64_t id, Shared<D>& shared) {
  constexpr int kSegments = D / SegmentDims(D), kRowBytes = SegmentDims(D) * 2;
  const Tile& tile = span.tile;
  for (int c = span.first; c < span.last; ++c) {
    const int tokens = min(tile.limit - c * kChunkTokens, kChunkTokens);
    const int blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
    const bool brings = Lane() < blocks;
    const int64_t from = brings ? args.BlockOfId(id, tile.kv_head) : 0;
    if (c + 1 < span.last) id = IdOf(args, (c + 1) * kChunkBlocks + Lane());
    const uint32_t bytes = static_cast<uint32_t>(min(tokens - Lane() * kBlockTokens, kBlockTokens) * kRowBytes);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (brings) {
        const auto slot = shared.slots.Ahead(Lane());
        slot.AwaitEmpty();
        ArriveExpecting(slot.Full(), bytes * kSegments);
#pragma unroll
        for (int i = 0; i < kSegments; ++i) {
          BulkCopy(slot.Buffer() + static_cast<uint32_t>(i * kBlockTokens * kRowBytes),
                   (part == 0 ? args.kv.k : args.kv.v) + from + i * kBlockTokens * SegmentDims(D), bytes, slot.Full());
        }
      }
      __syncwarp();
      shared.slots.Advance(blocks);
      if (part > 0 || c > span.first) continue;
      if (Lane() == 0) ArriveExpecting(shared.queries.Full(), static_cast<uint32_t>(tile.queries * D * 2));
      __syncwarp();
      if (Lane() < tile.queries) {
        BulkCopy(shared.queries.Buffer() + static_cast<uint32_t>(Lane() * D * 2), tile.Query(args, Lane()), D * 2,
                 shared.queries.Full());
      }
    }
  }
}

// The computing warps; `counted`: what a block has is one chunk of several.
template <int D>
__device__ __forceinline__ void Attend(const AttentionArgs& args, const Span& span, bool counted, Shared<D>& shared,
                                       const Results<D>& results) {
  const Tile& tile = span.tile;
  uint32_t q[D / 16][4];
  shared.queries.AwaitFull();
  LoadQueries<D>(q, shared.queries.Buffer());
  Result<D> total, chunk;
  total.Clear();
  const int seen[2] = {tile.Visible(args, Lane() / 4), tile.Visible(args, Lane() / 4 + 8)};
  for (int c = span.first; c < span.last; ++c) {
    const int begin = c * kChunkTokens;
    const int visible[2] = {seen[0] - begin, seen[1] - begin};
    AttendChunk<D>(chunk, shared, q, visible, min(tile.limit - begin, kChunkTokens), args.scale);
    if (counted) {
      results.Store(chunk, c);
    } else if (span.first == 0) {
      total.Add(chunk);
    } else {
      StoreSlot<D>(chunk, args, tile, span.slot + c);
    }
  }
  if (counted || span.first > 0) return;
  if (span.Whole()) {
    StoreOut<D>(total, args, tile);
  } else {
    StoreSlot<D>(total, args, tile, span.slot + span.last - 1);
  }
}

template <int D>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads) OneSequenceKernel(AttentionArgs args) {
  Shared<D> shared;
  Results<D> results{shared.base + Results<D>::kOffset, 0};
  if (threadIdx.x == 0) {
    InitBarrier(results.Barrier(), 1);
    shared.slots.Init(kWarps);
    shared.queries.Init(kWarps);
  }
  __syncwarp();
  ArriveClusterRelaxed();
  const int rank = static_cast<int>(RankInCluster()), head = static_cast<int>(blockIdx.x) / kCluster;
  const bool feeds = threadIdx.x >= kComputing;
  AwaitInputs();
  int64_t id = feeds ? IdOf(args, rank * kChunkBlocks + Lane()) : 0;
  Span span;
  span.tile = Tile(args, 0, head, 0, args.tile_queries);
  results.queries = span.tile.queries;
  span.chunks = span.tile.queries > 0 ? span.tile.Chunks() : 0;
  int each = (span.chunks + kCluster - 1) / kCluster;
  if (each > 1 && span.chunks * args.kv.num_kv_heads > args.num_slots) each = span.chunks;
  span.first = min(rank * each, span.chunks);
  span.last = min(span.first + each, span.chunks);
  span.prefix = each;
  span.slot = head * span.chunks;
  span.counter = 0;
  WaitCluster();  // all have begun, and their shared memory may be written
  if (span.first == span.last) return;
  const bool counted = each == 1 && span.chunks > 1;
  if (feeds) {
    if (each > 1) id = IdOf(args, span.first * kChunkBlocks + Lane());
    Feed<D>(args, span, id, shared);
  } else {
    Attend<D>(args, span, counted, shared, results);
  }
  if (counted) {
    if (rank == 0 && !feeds) results.Combine(args, span.tile, span.chunks);
  } else if (!span.Whole()) {
    __syncwarp();
    ArriveCluster();
    WaitCluster();
    if (rank == 0 && !feeds) CombineSlots<D, kComputing>(args, span);
  }
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

template <int D>
void LaunchOneSequence(const AttentionArgs& args, Stream& stream) {
  Launch(stream, OneSequenceKernel<D>, Grid(args.kv.num_kv_heads * kCluster), kThreads,
         Shared<D>::Bytes(0) + Results<D>::Bytes(args.group), args);
}

}  // namespace

bool AttendOneSequence(const AttentionArgs& args, Stream& stream) {
  // With fewer kv heads too many multiprocessors were idle where the context is long.
  if (args.kv.num_kv_heads * kCluster * 2 < StateOf(stream).num_sms - kCluster || args.group > kTileQueries) {
    return false;
  }
  switch (args.kv.head_dim) {
    case 64:
      return LaunchOneSequence<64>(args, stream), true;
    case 128:
      return LaunchOneSequence<128>(args, stream), true;
    default:
      return false;
  }
}

}  // namespace millrace::cuda
