// The token of a row with filters, by one block of 1024 threads: exactly FilterRow's and NoisyArgmax's, from the few
// tokens that matter. The largest by the slots' maxima hold what top-k and min-p keep; for top-p alone the weights of
// all tokens are added up in bins first, by a cluster of blocks where rows are few. Where more than 4096 tokens would
// have to be sorted, nothing is decided.
#pragma once

#include "kernels/cuda/leaders.cuh"
#include "kernels/cuda/sampling.cuh"

namespace millrace::cuda {

constexpr int32_t kUndecided = -2;

__device__ __forceinline__ float ScaledOf(uint64_t rank) { return ValueOf(static_cast<uint32_t>(rank >> 32)); }

// The token of the largest score among the first `count` ranks.
inline __device__ int32_t WinnerOf(int count, const SamplingRow& row, LeaderScratch& shared) {
  uint64_t floor = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kRowThreads) {
    const uint64_t rank = shared.ranks[i];
    floor = max(floor, uint64_t{KeyOf(BoundsOf(ScaledOf(rank), 1.0f, ~WordOf(row, TokenOf(rank))).lower)});
  }
  const float least = ValueOf(static_cast<uint32_t>(BlockMax(floor, shared.row)));
  double best_score = -INFINITY;
  uint64_t best = ~uint64_t{0};
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kRowThreads) {
    const uint64_t rank = shared.ranks[i];
    const uint32_t word = WordOf(row, TokenOf(rank));
    if (BoundsOf(ScaledOf(rank), 1.0f, ~word).upper < least) continue;
    const double score = ScaledOf(rank) + GumbelNoise(word);
    const uint64_t token = static_cast<uint64_t>(TokenOf(rank));
    if (score > best_score || (score == best_score && token < best)) {
      best_score = score;
      best = token;
    }
  }
  __syncthreads();
  const double largest = RowReduce(best_score, shared.row.doubles, [](double a, double b) { return a > b ? a : b; });
  __syncthreads();
  return static_cast<int32_t>(BlockMin(best_score == largest ? best : ~uint64_t{0}, shared.row));
}

// How many of the first `count` sorted ranks, in order, satisfy keep(rank): they are the first.
template <class Keep>
__device__ int CountFirst(int count, LeaderScratch& shared, const Keep& keep) {
  uint64_t kept = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kRowThreads) kept += keep(shared.ranks[i]) ? 1 : 0;
  __syncthreads();
  return static_cast<int>(BlockSum(kept, shared.row));
}

// How many of the first `count` sorted ranks top-p keeps: those before whose own weight, with `above`, does not yet
// reach the target(sum of the weights), and the first.
template <class Target>
__device__ int CountTopP(int count, uint64_t above, LeaderScratch& shared, const Target& target_of) {
  constexpr int kEach = kMaxLeaders / kRowThreads;
  uint64_t weights[kEach], own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = static_cast<int>(threadIdx.x) * kEach + i;
    weights[i] = at < count ? WeightOf(ScaledOf(shared.ranks[at])) : 0;
    own += weights[i];
  }
  uint64_t total;
  uint64_t before = above + RowScan(own, shared.row.words, total), kept = 0;
  const uint64_t target = target_of(total);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = static_cast<int>(threadIdx.x) * kEach + i;
    kept += at < count && (at == 0 || before < target) ? 1 : 0;
    before += weights[i];
  }
  __syncthreads();
  return static_cast<int>(BlockSum(kept, shared.row));
}

__device__ __forceinline__ uint64_t TargetOf(float top_p, uint64_t sum) {
  return static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(sum)));
}

// The winner of the tokens whose rank, by z, is at least `cutoff`, given that the first `count` ranks are among them.
inline __device__ int32_t WinnerFrom(uint64_t cutoff, int count, const TiledRow& tiled, const SamplingRow& row,
                                     LeaderScratch& shared) {
  __shared__ uint32_t floor_key;
  if (tiled.team.rank == 0) {
    uint64_t floor = KeyOf(-FLT_MAX);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kRowThreads) {
      const uint64_t rank = shared.ranks[i];
      floor = max(floor, uint64_t{KeyOf(BoundsOf(ScaledOf(rank), 1.0f, ~WordOf(row, TokenOf(rank))).lower)});
    }
    __syncthreads();
    floor = BlockMax(floor, shared.row);
    if (threadIdx.x == 0) {
      shared.floor = ValueOf(static_cast<uint32_t>(floor));
      shared.count = 0;
    }
  }
  const float first_floor = tiled.team.FromFirst(shared.floor);
  if (threadIdx.x == 0) floor_key = KeyOf(first_floor);
  const float least = ScaledOf(cutoff);
  LeaderScratch& all = tiled.team.Of(0, shared);
  ForManyGroups(
      tiled, [&](float z) { return z >= least; },
      [&](int64_t v, const float(&x)[4]) {
        float z[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = tiled.Scaled(x[i]);
        const float most = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
        const float behind = ValueOf(*static_cast<volatile uint32_t*>(&floor_key)) - most;
        if (most < least || behind > 22.95f) return;
        const uint4 four = Philox(row.seed, row.position, static_cast<uint32_t>(v / 4));
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
        const uint32_t limit = __float2uint_rz(__expf(-behind) * 0x1.01p32f + 1.0f);
        if (~max(max(four.x, four.y), max(four.z, four.w)) > limit) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (z[i] == -INFINITY || RankOf(z[i], v + i) < cutoff) continue;
          const Bounds bounds = BoundsOf(z[i], 1.0f, ~words[i]);
          if (bounds.upper < ValueOf(*static_cast<volatile uint32_t*>(&floor_key))) continue;
          atomicMax(&floor_key, KeyOf(bounds.lower));
          const int at = atomicAdd(&all.count, 1);
          if (at < kMaxLeaders) all.ranks[at] = RankOf(z[i], v + i);
        }
      });
  const int found = tiled.team.FromFirst(shared.count);
  return found > kMaxLeaders || tiled.team.rank > 0 ? kUndecided : WinnerOf(found, row, shared);
}

// The rank from which top-p keeps, of the tokens whose z is at least `least`; 0 if it cannot tell. The first of
// `count` sorted ranks are kept then. In all blocks of the team.
inline __device__ uint64_t CutoffOfTopP(float least, const TiledRow& tiled, const SamplingRow& row, int& count,
                                        LeaderScratch& shared) {
  ClearBins(shared);
  ForManyGroups(
      tiled, [](float z) { return z > -31.0f; },  // below, weights are zero
      [&](int64_t, const float(&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float z = tiled.Scaled(x[i]);
          const uint64_t weight = z < least ? 0 : WeightOf(z);
          if (weight == 0) continue;
          const int bin = BinOf(z);
          const uint32_t low = static_cast<uint32_t>(weight);
          const uint32_t carry = atomicAdd(&shared.low[bin], low) > ~low ? 1 : 0;
          const uint32_t high = static_cast<uint32_t>(weight >> 32) + carry;
          if (high != 0) atomicAdd(&shared.high[bin], high);
        }
      });
  tiled.team.Sync();
  uint64_t target = 0;
  if (tiled.team.rank == 0) {
    for (int b = static_cast<int>(threadIdx.x); b < kBins && tiled.team.size > 1; b += kRowThreads) {
      uint64_t sum = 0;
      for (int other = 0; other < tiled.team.size; ++other) sum += WeightOfBin(tiled.team.Of(other, shared), b);
      shared.low[b] = static_cast<uint32_t>(sum);
      shared.high[b] = static_cast<uint32_t>(sum >> 32);
    }
    FirstBin(shared, [&](uint64_t total) { return target = TargetOf(row.top_p, total); });
  }
  const int bin = tiled.team.FromFirst(shared.bin);
  if (bin == kBins) return 0;
  if (!GatherLeaders(tiled, bin, bin, shared, [](float, float z, int64_t v) { return RankOf(z, v); })) return 0;
  if (tiled.team.rank == 0) {
    SortLeaders(shared);
    count = CountFirst(shared.count, shared, [&](uint64_t rank) { return !(ScaledOf(rank) < least); });
    count = CountTopP(count, shared.above, shared, [&](uint64_t) { return target; });
    if (threadIdx.x == 0) shared.cutoff = shared.ranks[count - 1];
  }
  return tiled.team.FromFirst(shared.cutoff);
}

// Whether a team of several blocks helps: they share the passes that top-p alone takes over all tokens.
__device__ __forceinline__ bool SharesPasses(const SamplingRow& row, int64_t vocab) {
  return row.temperature != 0 && row.top_p < 1 && row.min_p == 0 && !(row.top_k > 0 && row.top_k < vocab);
}

// `unfiltered` is the winner of the row without filters, or -1 where it is not known: if it is kept, it is the answer.
// Of a team's blocks, the first's.
inline __device__ int32_t ChooseFiltered(const TiledRow& tiled, const SamplingRow& row, int32_t unfiltered,
                                         LeaderScratch& shared) {
  const float least = row.min_p > 0 ? static_cast<float>(NaturalLog(row.min_p)) : kForbidden;
  const bool top_k = row.top_k > 0 && row.top_k < tiled.vocab;
  if (!top_k && row.top_p >= 1 && unfiltered >= 0 && tiled.Scaled(tiled.x[unfiltered]) >= least) return unfiltered;
  int last = kBins;
  if (top_k) {
    last = BinOfLargest(tiled, row.top_k, shared);
    if (last == kBins && row.min_p == 0) return kUndecided;
  }
  if (row.min_p > 0) last = min(last, BinOf(least));
  if (last < kBins && GatherLeaders(tiled, 0, last, shared, [](float, float z, int64_t v) { return RankOf(z, v); })) {
    SortLeaders(shared);
    int count = CountFirst(shared.count, shared, [&](uint64_t rank) { return !(ScaledOf(rank) < least); });
    if (top_k && row.top_k < count) {
      const float kth = ScaledOf(shared.ranks[row.top_k - 1]);
      count = CountFirst(count, shared, [&](uint64_t rank) { return ScaledOf(rank) >= kth; });
    }
    if (row.top_p < 1) {
      count = CountTopP(count, 0, shared, [&](uint64_t total) { return TargetOf(row.top_p, total); });
    }
    return WinnerOf(count, row, shared);
  }
  if (top_k) return kUndecided;
  uint64_t cutoff = uint64_t{KeyOf(least)} << 32;
  int count = 0;
  if (row.top_p < 1) {
    cutoff = CutoffOfTopP(least, tiled, row, count, shared);
    if (cutoff == 0) return kUndecided;
  }
  if (unfiltered >= 0 && RankOf(tiled.Scaled(tiled.x[unfiltered]), unfiltered) >= cutoff) return unfiltered;
  return WinnerFrom(cutoff, count, tiled, row, shared);
}

}  // namespace millrace::cuda
