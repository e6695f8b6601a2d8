// out[t, h] = sum over s of softmax_s(scale * q[t, h] . k[s]) * v[s] for sequences of few rows (decode).
// A block walks its share of the work (attention_plan.cuh) chunk by chunk; what its warps do with a chunk is in
// attention_block.cuh, and the warp that feeds them is far ahead of the others. A tile that is one block's is finished
// there; of one that several share every chunk's result goes to the workspace (those that begin the tile come
// combined), and the block that completes it combines them in order. Bound: bytes, 4 D per token and kv head. H200,
// 2026-11-30, share of a copy's 4228 GB/s: 256 sequences of 107 to 2011 tokens 97 % (16 heads, 8 kv heads of 128), 95 %
// (32, 8 of 128), 68 % (14, 2 of 64); 32 of 1024 tokens 87 % (32, 8 of 128).
#include "kernels/check.h"
#include "kernels/cuda/attention_block.cuh"
#include "kernels/cuda/attention_slots.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

// Counts a span's chunks as done; whoever completes the tile combines it.
template <int D>
__device__ __forceinline__ void CompleteTile(const AttentionArgs& args, const Span& span) {
  __shared__ bool completes;
  __threadfence();
  SyncComputing();
  if (threadIdx.x == 0) {
    int* const counter = args.counters + Plan::kCounters + span.counter;
    const int count = span.last - span.first;
    completes = atomicAdd(counter, count) + count == span.chunks;
    if (completes) *counter = 0;
  }
  SyncComputing();
  if (!completes) return;
  __threadfence();
  CombineSlots<D, kComputing>(args, span);
}

// The feeding warp's part of a span.
template <int D>
__device__ __forceinline__ void FeedSpan(const AttentionArgs& args, const Span& span, Shared<D>& shared) {
  constexpr int kBlocksAtOnce = kWarp;  // whose ids the lanes hold
  constexpr int kRowBytes = SegmentDims(D) * 2;
  const Tile& tile = span.tile;
  const int all = (tile.limit + kBlockTokens - 1) / kBlockTokens;
  const auto block_of = [&](int c) {
    const int b = c * kChunkBlocks + Lane();
    return b < all ? args.Block(tile.sequence, tile.kv_head, b) : 0;
  };
  int64_t mine = block_of(span.first);
  const auto feed_queries = [&] {
    shared.queries.AwaitEmpty();
    if (Lane() == 0) {
      shared.QueriesSpan() = span;
      ArriveExpecting(shared.queries.Full(), static_cast<uint32_t>(tile.queries * D * 2));
    }
    __syncwarp();
    if (Lane() < tile.queries) {
      BulkCopy(shared.queries.Buffer() + static_cast<uint32_t>(Lane() * D * 2), tile.Query(args, Lane()), D * 2,
               shared.queries.Full());
    }
    shared.queries.Advance();
  };
  for (int c = span.first; c < span.last; ++c) {
    const int held = (c - span.first) * kChunkBlocks % kBlocksAtOnce;
    if (held == 0 && c > span.first) mine = block_of(c);
    const int tokens = min(tile.limit - c * kChunkTokens, kChunkTokens);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      for (int b = 0; b * kBlockTokens < tokens; ++b) {
        const bf16* const from = (part == 0 ? args.kv.k : args.kv.v) + __shfl_sync(~0u, mine, held + b);
        const int count = min(tokens - b * kBlockTokens, kBlockTokens);
        shared.slots.AwaitEmpty();
        if (Lane() == 0) {
          const uint32_t to = shared.slots.Buffer(), barrier = shared.slots.Full();
          ArriveExpecting(barrier, static_cast<uint32_t>(count * D * 2));
          if (count == kBlockTokens) {
            BulkCopy(to, from, kSlotBytes<D>, barrier);
          } else {
#pragma unroll
            for (int i = 0; i < D / SegmentDims(D); ++i) {
              BulkCopy(to + static_cast<uint32_t>(i * kBlockTokens * kRowBytes),
                       from + i * kBlockTokens * SegmentDims(D), static_cast<uint32_t>(count * kRowBytes), barrier);
            }
          }
        }
        shared.slots.Advance();
      }
      if (part == 0 && c == span.first) feed_queries();  // which take less time than the first keys
    }
  }
}

// The computing warps' part of a span.
template <int D>
__device__ __forceinline__ void AttendSpan(const AttentionArgs& args, const Span& span, Shared<D>& shared) {
  const Tile& tile = span.tile;
  uint32_t q[D / 16][4];
  LoadQueries<D>(q, shared.queries.Buffer());
  __syncwarp();
  if (Lane() == 0) Arrive(shared.queries.Empty());
  shared.queries.Advance();
  Result<D> total, chunk;
  total.Clear();
  const int seen[2] = {tile.Visible(args, Lane() / 4), tile.Visible(args, Lane() / 4 + 8)};
  for (int c = span.first; c < span.last; ++c) {
    const int begin = c * kChunkTokens;
    const int visible[2] = {seen[0] - begin, seen[1] - begin};
    AttendChunk<D>(chunk, shared, q, visible, min(tile.limit - begin, kChunkTokens), args.scale);
    if (span.first == 0) {
      total.Add(chunk);
    } else {
      StoreSlot<D>(chunk, args, tile, span.slot + c);
    }
  }
  if (span.Whole()) {
    StoreOut<D>(total, args, tile);
  } else {
    if (span.first == 0) StoreSlot<D>(total, args, tile, span.slot + span.last - 1);
    CompleteTile<D>(args, span);
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<D>) FewQueriesKernel(AttentionArgs args) {
  Shared<D> shared;
  if (threadIdx.x == 0) {  // of no other kernel's concern
    shared.slots.Init(kWarps);
    shared.queries.Init(kWarps);
  }
  AwaitInputs();
  __syncthreads();
  if (threadIdx.x >= kComputing) {
    Plan plan(args, shared.Ends());
    for (;;) {
      const Span span = plan.Next(args, args.counters);
      if (span.chunks == 0) break;
      FeedSpan<D>(args, span, shared);
    }
    shared.queries.AwaitEmpty();
    if (Lane() == 0) {
      shared.QueriesSpan().chunks = 0;
      Arrive(shared.queries.Full());
    }
    return;
  }
  for (;;) {
    shared.queries.AwaitFull();
    const Span span = shared.QueriesSpan();
    if (span.chunks == 0) return;
    AttendSpan<D>(args, span, shared);
  }
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

template <int D>
void LaunchFewQueries(const AttentionArgs& args, Stream& stream) {
  const int64_t blocks = int64_t{StateOf(stream).num_sms} * kBlocksPerSm<D>;
  MILLRACE_CHECK(Plan::Counters(blocks) <= State::kNumCounters, "the blocks have counters", blocks);
  Launch(stream, FewQueriesKernel<D>, Grid(blocks), kThreads, Shared<D>::Bytes(args.batch.context_len.size), args);
}

}  // namespace

void AttendFewQueries(const AttentionArgs& args, Stream& stream) {
  switch (args.kv.head_dim) {
    case 16:
      return LaunchFewQueries<16>(args, stream);
    case 32:
      return LaunchFewQueries<32>(args, stream);
    case 48:
      return LaunchFewQueries<48>(args, stream);
    case 64:
      return LaunchFewQueries<64>(args, stream);
    case 96:
      return LaunchFewQueries<96>(args, stream);
    default:
      return LaunchFewQueries<128>(args, stream);
  }
}

}  // namespace millrace::cuda
