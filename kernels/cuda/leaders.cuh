// A row's largest values without reading all of it again. A first pass cuts rows into tiles of 4096 tokens, a thread of
// it takes four groups of four tokens of each, and leaves the largest of the sixteen; by these maxima a block of 1024
// threads later finds the few slots of sixteen tokens that can hold what it looks for. Values are told apart by how far
// they lie below the largest: bins whose width grows with the distance serve flat and peaked rows alike.
#pragma once

#include "kernels/cuda/vocabulary.cuh"

namespace millrace::cuda {

constexpr int kTileThreads = 256;
constexpr int kGroups = 4;  // of a thread in a tile, of four tokens each
constexpr int kGroupStride = kTileThreads * 4;
constexpr int kTile = kTileThreads * kGroups * 4;

constexpr int kBins = 1 << 11;  // 64 for each power of two of the distance
constexpr int kMaxLeaders = 1 << 12;

// The sixteen tokens of a thread, from v on; those beyond the row are -infinity. `finite` becomes NaN where a value is
// not finite.
__device__ __forceinline__ void LoadSlot(float (&x)[kGroups][4], const float* row, int64_t v, int64_t vocab,
                                         bool in_packs, float& finite) {
  if (in_packs && v + (kGroups - 1) * kGroupStride < vocab) {  // rows are a multiple of four then
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float4 four = *reinterpret_cast<const float4*>(row + v + g * kGroupStride);
      x[g][0] = four.x, x[g][1] = four.y, x[g][2] = four.z, x[g][3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < kGroups * 4; ++i) finite = __fmaf_rn(x[i / 4][i % 4], 0.0f, finite);
    return;
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = v + g * kGroupStride + i;
      x[g][i] = at < vocab ? row[at] : -INFINITY;
      if (at < vocab) finite = __fmaf_rn(x[g][i], 0.0f, finite);
    }
  }
}

// A row of values with the maxima of its slots; z(v) = (x[v] - max) / temperature.
struct TiledRow {
  const float* x;
  const float* maxima;
  int64_t vocab;
  bool in_packs;
  float max;
  float temperature;

  __device__ int64_t slots() const { return DivideUp(vocab, kTile) * kTileThreads; }
  __device__ float Scaled(float value) const { return (value - max) / temperature; }
};

struct LeaderScratch {
  RowScratch row;
  union {
    struct {
      uint32_t low[kBins];  // of the bins' weights
      uint32_t high[kBins];
    };
    uint64_t ranks[kMaxLeaders];
  };
  int count;  // of ranks, and of those that found no place
  int bin;
  uint64_t above;
};

__device__ __forceinline__ int BinOf(float z) {
  return min(max((static_cast<int>(__float_as_uint(fabsf(z)) >> 17)) - (111 << 6), 0), kBins - 1);
}

// fn(v, four values) for the groups of this thread's slots whose largest z is `wanted`; a z of -infinity never is.
template <class Wanted, class Fn>
__device__ __forceinline__ void ForGroups(const TiledRow& row, const Wanted& wanted, const Fn& fn) {
  const int64_t slots = row.slots();
  for (int64_t s = threadIdx.x; s < slots; s += kRowThreads) {
    const float z = row.Scaled(row.maxima[s]);
    if (z == -INFINITY || !wanted(z)) continue;
    float values[kGroups][4], finite = 0;
    const int64_t v = s / kTileThreads * kTile + s % kTileThreads * 4;
    LoadSlot(values, row.x, v, row.vocab, row.in_packs, finite);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) fn(v + g * kGroupStride, values[g]);
  }
}

inline __device__ void ClearBins(LeaderScratch& shared) {
  __syncthreads();
  for (int b = static_cast<int>(threadIdx.x); b < kBins; b += kRowThreads) shared.low[b] = shared.high[b] = 0;
  __syncthreads();
}

inline __device__ uint64_t WeightOfBin(const LeaderScratch& shared, int bin) {
  return uint64_t{shared.high[bin]} << 32 | shared.low[bin];
}

// The first bin at which the weight of the nearer ones and its own reaches the target(sum of all); kBins if none does.
// shared.above becomes the weight of the nearer ones.
template <class Target>
__device__ int FirstBin(LeaderScratch& shared, const Target& target_of) {
  static_assert(kBins == 2 * kRowThreads);
  __syncthreads();
  const int first = 2 * static_cast<int>(threadIdx.x);
  const uint64_t weights[2] = {WeightOfBin(shared, first), WeightOfBin(shared, first + 1)};
  if (threadIdx.x == 0) shared.bin = kBins;
  uint64_t total;
  uint64_t before = BlockScan(weights[0] + weights[1], shared.row.words, total);
  const uint64_t target = target_of(total);
  for (int i = 0; i < 2; ++i) {
    if (before < target && before + weights[i] >= target) {
      shared.bin = first + i;
      shared.above = before;
    }
    before += weights[i];
  }
  __syncthreads();
  return shared.bin;
}

// Collects rank(x, z, v) of the tokens in bins [first, last]. Returns whether all found a place.
template <class Rank>
__device__ bool GatherLeaders(const TiledRow& row, int first, int last, LeaderScratch& shared, const Rank& rank) {
  __syncthreads();
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  ForGroups(
      row, [&](float z) { return BinOf(z) <= last; },
      [&](int64_t v, const float(&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float z = row.Scaled(x[i]);
          const int bin = BinOf(z);
          if (z == -INFINITY || bin < first || bin > last) continue;
          const int at = atomicAdd(&shared.count, 1);
          if (at < kMaxLeaders) shared.ranks[at] = rank(x[i], z, v + i);
        }
      });
  __syncthreads();
  return shared.count <= kMaxLeaders;
}

// The bin up to which there are at least k tokens, told from the maxima alone; kBins if they cannot tell.
inline __device__ int BinOfLargest(const TiledRow& row, int64_t k, LeaderScratch& shared) {
  ClearBins(shared);
  const int64_t slots = row.slots();
  for (int64_t s = threadIdx.x; s < slots; s += kRowThreads) {
    const float z = row.Scaled(row.maxima[s]);
    if (z != -INFINITY) atomicAdd(&shared.low[BinOf(z)], 1u);
  }
  return FirstBin(shared, [&](uint64_t) { return static_cast<uint64_t>(k); });
}

// Sorts the ranks, the largest first: bitonic, padded with zeros. Pairs of a warp lie within 64 entries while they are
// less than 64 apart.
inline __device__ void SortLeaders(LeaderScratch& shared) {
  int size = 64;
  while (size < shared.count) size *= 2;
  for (int i = shared.count + static_cast<int>(threadIdx.x); i < size; i += kRowThreads) shared.ranks[i] = 0;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int apart = run / 2; apart > 0; apart /= 2) {
      for (int pair = static_cast<int>(threadIdx.x); pair < size / 2; pair += kRowThreads) {
        const int i = 2 * pair - pair % apart, j = i + apart;
        const uint64_t a = shared.ranks[i], b = shared.ranks[j];
        if ((a < b) == ((i & run) == 0)) {
          shared.ranks[i] = b;
          shared.ranks[j] = a;
        }
      }
      if (apart > kWarp) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
    __syncthreads();
  }
}

}  // namespace millrace::cuda
