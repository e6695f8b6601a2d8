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
constexpr int kMaxWanted = 1 << 10;

// The sixteen tokens of a thread, from v on; those beyond the row are -infinity. `finite` becomes NaN where a value is
// not finite. Whether the whole tile lies in the row is the same for a warp's threads.
__device__ __forceinline__ void LoadSlot(float (&x)[kGroups][4], const float* row, int v, int vocab, bool whole,
                                         float& finite) {
  if (whole) {
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
  for (int i = 0; i < kGroups * 4; ++i) {
    const int at = v + i / 4 * kGroupStride + i % 4;
    x[i / 4][i % 4] = at < vocab ? row[at] : -INFINITY;
  }
#pragma unroll
  for (int i = 0; i < kGroups * 4; ++i) {
    if (v + i / 4 * kGroupStride + i % 4 < vocab) finite = __fmaf_rn(x[i / 4][i % 4], 0.0f, finite);
  }
}

// The blocks that share a row: one, or all of a cluster. The first decides; its memory is where they meet.
struct Team {
  int rank;
  int size;

  __device__ void Sync() const {
    if (size == 1) return __syncthreads();
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  }
  // What the block of this rank has where this one has `local`.
  template <class T>
  __device__ T& Of(int other, T& local) const {
    if (size == 1) return local;
    uint64_t at;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(reinterpret_cast<uint64_t>(&local)), "r"(other));
    return *reinterpret_cast<T*>(at);
  }
  // The first block's value, once it is there; it may change afterwards.
  template <class T>
  __device__ T FromFirst(T& local) const {
    Sync();
    const T value = Of(0, local);
    Sync();
    return value;
  }
};

// A row of values with the maxima of its slots; z(v) = (x[v] - max) / temperature.
struct TiledRow {
  const float* x;
  const float* maxima;
  int64_t vocab;
  bool in_packs;
  float max;
  float temperature;
  Team team;

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
  int slots[kMaxWanted];
  int wanted;  // slots, and those that found no place
  int bin;
  uint64_t above;
  uint64_t cutoff;
  float floor;
};

__device__ __forceinline__ int BinOf(float z) {
  return min(max((static_cast<int>(__float_as_uint(fabsf(z)) >> 17)) - (111 << 6), 0), kBins - 1);
}

// fn(s, z) for the maxima of this thread's slots, of all of the team's, that are not forbidden.
template <class Fn>
__device__ __forceinline__ void ForMaxima(const TiledRow& row, const Fn& fn) {
  constexpr int kAhead = 5;
  const int slots = static_cast<int>(row.slots());
  const int step = row.team.size * kRowThreads;
  for (int begin = row.team.rank * kRowThreads + static_cast<int>(threadIdx.x); begin < slots; begin += kAhead * step) {
    float most[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int s = begin + i * step;
      most[i] = s < slots ? row.maxima[s] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float z = row.Scaled(most[i]);
      if (z != -INFINITY) fn(begin + i * step, z);
    }
  }
}

__device__ __forceinline__ int FirstTokenOf(int slot) { return slot / kTileThreads * kTile + slot % kTileThreads * 4; }

// fn(v, four values) for the groups of the slots whose largest z is `wanted`, where that may be most of them.
template <class Wanted, class Fn>
__device__ __forceinline__ void ForManyGroups(const TiledRow& row, const Wanted& wanted, const Fn& fn) {
  const int slots = static_cast<int>(row.slots()), vocab = static_cast<int>(row.vocab);
  float ignored = 0;
#pragma unroll 1
  for (int s = row.team.rank * kRowThreads + static_cast<int>(threadIdx.x); s < slots;
       s += row.team.size * kRowThreads) {
    const float z = row.Scaled(row.maxima[s]);
    if (z == -INFINITY || !wanted(z)) continue;
    float x[kGroups][4];
    const int v = FirstTokenOf(s);
    LoadSlot(x, row.x, v, vocab, row.in_packs && (s / kTileThreads + 1) * kTile <= vocab, ignored);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) fn(int64_t{v + g * kGroupStride}, x[g]);
  }
}

// The same where few are wanted: they are listed first and shared out by groups.
template <class Wanted, class Fn>
__device__ __forceinline__ void ForFewGroups(const TiledRow& row, LeaderScratch& shared, const Wanted& wanted,
                                             const Fn& fn) {
  __syncthreads();
  if (threadIdx.x == 0) shared.wanted = 0;
  __syncthreads();
  ForMaxima(row, [&](int slot, float z) {
    if (!wanted(z)) return;
    const int at = atomicAdd(&shared.wanted, 1);
    if (at < kMaxWanted) shared.slots[at] = slot;
  });
  __syncthreads();
  if (shared.wanted > kMaxWanted) return ForManyGroups(row, wanted, fn);
  for (int i = static_cast<int>(threadIdx.x); i < shared.wanted * kGroups; i += kRowThreads) {
    const int64_t v = FirstTokenOf(shared.slots[i / kGroups]) + i % kGroups * kGroupStride;
    float x[4];
    if (row.in_packs && v < row.vocab) {
      const float4 four = *reinterpret_cast<const float4*>(row.x + v);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = v + j < row.vocab ? row.x[v + j] : -INFINITY;
    }
    fn(v, x);
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
  uint64_t before = RowScan(weights[0] + weights[1], shared.row.words, total);
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

// Collects rank(x, z, v) of the tokens in bins [first, last] with the team's first block. Returns whether all found a
// place.
template <class Rank>
__device__ bool GatherLeaders(const TiledRow& row, int first, int last, LeaderScratch& shared, const Rank& rank) {
  LeaderScratch& all = row.team.Of(0, shared);
  row.team.Sync();
  if (threadIdx.x == 0) shared.count = 0;
  row.team.Sync();
  ForFewGroups(
      row, shared, [&](float z) { return BinOf(z) <= last; },
      [&](int64_t v, const float(&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float z = row.Scaled(x[i]);
          const int bin = BinOf(z);
          if (z == -INFINITY || bin < first || bin > last) continue;
          const int at = atomicAdd(&all.count, 1);
          if (at < kMaxLeaders) all.ranks[at] = rank(x[i], z, v + i);
        }
      });
  return row.team.FromFirst(shared.count) <= kMaxLeaders;
}

// The bin up to which there are at least k tokens, told from the maxima alone; kBins if they cannot tell.
inline __device__ int BinOfLargest(const TiledRow& row, int64_t k, LeaderScratch& shared) {
  ClearBins(shared);
  ForMaxima(row, [&](int, float z) { atomicAdd(&shared.low[BinOf(z)], 1u); });
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
