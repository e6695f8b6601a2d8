// Which warp attends to what: work items counted on the GPU, for the host does not know the contexts. An item is a tile
// of 16 queries of one kv head, with one chunk of the context where the sequence is split, else with all of it. How the
// work is split changes no bits.
#pragma once

#include "kernels/cuda/attention.cuh"

namespace millrace::cuda {

struct AttendItem {
  int sequence;
  int kv_head;
  int tile;
  int first_chunk;
  int end_chunk;
  int64_t partial;  // of row 0 and first_chunk; -1: not split
};

// Sets ends[s] to the number of items of the sequences up to s, and partials[s] to first_partial[s]; returns the number
// of all.
template <int kThreads>
__device__ int64_t PlanItems(const AttentionArgs& args, int32_t* ends, int32_t* partials) {
  __shared__ int64_t shared[kThreads / kWarp];
  const int count = args.Sequences(), per_thread = static_cast<int>(DivideUp(count, kThreads));
  const int begin = static_cast<int>(threadIdx.x) * per_thread, end = min(begin + per_thread, count);
  const auto partials_of = [&](int s) {
    const int rows = args.Rows(s);
    return rows <= kMaxSplitRows ? int64_t{args.Chunks(s)} * rows : 0;
  };
  int64_t sum = 0, total = 0;
  for (int s = begin; s < end; ++s) sum += partials_of(s);
  int64_t first = BlockScan(sum, shared, total);
  sum = 0;
  for (int s = begin; s < end; ++s) {
    const int64_t needed = partials_of(s);
    const bool split = needed > 0 && first + needed <= args.max_partials;
    partials[s] = split ? static_cast<int32_t>(first) : -1;
    first += needed;
    sum += int64_t{args.kv.num_kv_heads} * args.Tiles(s) * (split ? args.Chunks(s) : 1);
    ends[s] = static_cast<int32_t>(sum);
  }
  const int64_t before = BlockScan(sum, shared, total);
  for (int s = begin; s < end; ++s) ends[s] += static_cast<int32_t>(before);
  __syncthreads();
  return total;
}

__device__ __forceinline__ AttendItem FindItem(const AttentionArgs& args, const int32_t* ends, const int32_t* partials,
                                               int item) {
  int low = 0, high = args.Sequences() - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > item) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int local = item - (low > 0 ? ends[low - 1] : 0), chunks = args.Chunks(low), tiles = args.Tiles(low);
  if (partials[low] < 0) return {low, local / tiles, local % tiles, 0, chunks, -1};
  const int chunk = local % chunks;
  return {low,
          local / chunks / tiles,
          local / chunks % tiles,
          chunk,
          chunk + 1,
          partials[low] + int64_t{chunk} * args.Rows(low)};
}

}  // namespace millrace::cuda
