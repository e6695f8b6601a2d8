// What ProcessLogits and Sample share: penalties, the random words, and by one block of 1024 threads the filters and
// the argmax over a row of any kind. Filters find where the weight from the largest value down reaches a target, in
// three passes over ever finer buckets of the values' bits; probabilities count in units of 2^-44, so that their sums
// are exact and depend on no order.
#pragma once

#include <cfloat>

#include "kernels/cuda/vocabulary.cuh"
#include "kernels/gumbel.h"
#include "kernels/ops.h"

namespace millrace::cuda {

constexpr float kForbidden = -INFINITY;
constexpr float kUnit = 0x1p44f;        // of a weight
constexpr int64_t kMaxVocab = 1 << 19;  // their sum fits in 64 bits
constexpr int kBuckets = 1 << 11;

struct FilterScratch {
  RowScratch row;
  unsigned long long buckets[kBuckets];
  uint32_t chosen;
  uint64_t above;
};

inline __device__ float Penalised(float z, TokenCount seen, const SamplingRow& row) {
  if (seen == 0) return z;
  z = z > 0 ? z / row.repetition_penalty : z * row.repetition_penalty;
  const TokenCount count = seen & ~kPromptToken;
  z -= row.frequency_penalty * static_cast<float>(count);
  return count > 0 ? z - row.presence_penalty : z;
}

// Where the weight of the values from the largest down reaches a target.
struct Boundary {
  float value;     // the value at which it does
  uint64_t above;  // the weight of all larger values
};

// The first bucket from the top whose weight, with `above`, reaches the target; else the last that has any. Bucket i
// from the top is looked at by thread i / 2.
inline __device__ void ChooseBucket(FilterScratch& shared, int buckets, uint64_t above, uint64_t target) {
  const int first = 2 * static_cast<int>(threadIdx.x);
  uint64_t weights[2] = {0, 0};
  for (int i = 0; i < 2; ++i) {
    if (first + i < buckets) weights[i] = shared.buckets[buckets - 1 - first - i];
  }
  uint64_t total;
  const uint64_t before = above + RowScan(weights[0] + weights[1], shared.row.words, total);
  const uint64_t through[2] = {before + weights[0], before + weights[0] + weights[1]};
  uint64_t reaching = ~uint64_t{0}, last = 0;
  for (int i = 1; i >= 0; --i) {
    if (weights[i] == 0) continue;
    if (through[i] >= target) reaching = static_cast<uint64_t>(first + i);
    last = max(last, static_cast<uint64_t>(first + i));
  }
  reaching = BlockMin(reaching, shared.row);
  last = BlockMax(last, shared.row);
  const int chosen = static_cast<int>(reaching == ~uint64_t{0} ? last : reaching);
  if (chosen / 2 == static_cast<int>(threadIdx.x)) {
    shared.chosen = static_cast<uint32_t>(buckets - 1 - chosen);
    shared.above = chosen % 2 == 0 ? before : through[0];
  }
  __syncthreads();
}

// buckets[bucket] += w. Logits crowd into few buckets: what two of a warp's buckets get is summed in registers first.
// Called by whole warps.
__device__ __forceinline__ void AddToBucket(FilterScratch& shared, uint32_t bucket, uint64_t w) {
  for (int i = 0; i < 2; ++i) {
    const unsigned left = __ballot_sync(~0u, w != 0);
    if (left == 0) return;
    const int leader = __ffs(static_cast<int>(left)) - 1;
    const bool same = bucket == __shfl_sync(~0u, bucket, leader);
    const uint64_t sum = WarpReduce(same ? w : uint64_t{0}, [](uint64_t a, uint64_t b) { return a + b; });
    if (static_cast<int>(threadIdx.x % kWarp) == leader) atomicAdd(&shared.buckets[bucket], sum);
    if (same) w = 0;
  }
  if (w != 0) atomicAdd(&shared.buckets[bucket], w);
}

// Values of weight zero count as absent.
template <class Weight>
__device__ Boundary FindBoundary(const float* z, int64_t vocab, uint64_t target, FilterScratch& shared,
                                 const Weight& weight) {
  uint64_t prefix = 0, above = 0;
  for (int bits_left = 32; bits_left > 0;) {
    const int bits = bits_left > 10 ? 11 : 10, buckets = 1 << bits;
    __syncthreads();
    for (int b = static_cast<int>(threadIdx.x); b < kBuckets; b += kRowThreads) shared.buckets[b] = 0;
    __syncthreads();
    for (int64_t begin = 0; begin < vocab; begin += kRowThreads) {
      const int64_t v = begin + threadIdx.x;
      const uint64_t key = v < vocab ? KeyOf(z[v]) : 0;
      const uint64_t w = v < vocab && key >> bits_left == prefix ? weight(z[v]) : 0;
      AddToBucket(shared, static_cast<uint32_t>(key >> (bits_left - bits)) & static_cast<uint32_t>(buckets - 1), w);
    }
    __syncthreads();
    ChooseBucket(shared, buckets, above, target);
    prefix = prefix << bits | shared.chosen;
    above = shared.above;
    bits_left -= bits;
  }
  return {ValueOf(static_cast<uint32_t>(prefix)), above};
}

inline __device__ void KeepFrom(float* z, int64_t vocab, float least) {
  ForRow(vocab, [&](int64_t v) {
    if (z[v] < least) z[v] = kForbidden;
  });
}

__device__ __forceinline__ uint64_t WeightOf(float z) { return static_cast<uint64_t>(__float2ull_rz(Exp(z) * kUnit)); }

// Of the tokens of this value the lowest `count` stay.
inline __device__ void KeepLowest(float* z, int64_t vocab, float value, uint64_t count, FilterScratch& shared) {
  uint64_t ties = 0;
  ForRow(vocab, [&](int64_t v) { ties += z[v] == value ? 1 : 0; });
  if (BlockSum(ties, shared.row) <= count) return;
  uint64_t before = 0;
  for (int64_t begin = 0; begin < vocab; begin += kRowThreads) {
    const int64_t v = begin + threadIdx.x;
    const bool tie = v < vocab && z[v] == value;
    uint64_t total;
    const uint64_t rank = before + RowScan(uint64_t{tie}, shared.row.words, total);
    if (tie && rank >= count) z[v] = kForbidden;
    before += total;
  }
}

inline __device__ void KeepTopP(float* z, int64_t vocab, float top_p, FilterScratch& shared) {
  uint64_t sum = 0;
  ForRow(vocab, [&](int64_t v) { sum += WeightOf(z[v]); });
  sum = BlockSum(sum, shared.row);
  const uint64_t target = static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(sum)));
  const Boundary boundary = FindBoundary(z, vocab, target, shared, [](float x) { return WeightOf(x); });
  KeepFrom(z, vocab, boundary.value);
  const uint64_t each = WeightOf(boundary.value), missing = target > boundary.above ? target - boundary.above : 1;
  KeepLowest(z, vocab, boundary.value, (missing + each - 1) / each, shared);
}

// z[v] = what is left of x[v], whose largest is max, after the filters; z may be x.
inline __device__ void FilterRow(float* z, const float* x, float max, int64_t vocab, const SamplingRow& row,
                                 FilterScratch& shared) {
  const float least = row.min_p > 0 ? static_cast<float>(NaturalLog(row.min_p)) : kForbidden;
  ForRow(vocab, [&](int64_t v) {
    const float scaled = (x[v] - max) / row.temperature;
    z[v] = scaled < least ? kForbidden : scaled;
  });
  if (row.top_k > 0 && row.top_k < vocab) {
    const auto present = [](float value) { return uint64_t{value != kForbidden}; };
    KeepFrom(z, vocab, FindBoundary(z, vocab, static_cast<uint64_t>(row.top_k), shared, present).value);
  }
  if (row.top_p < 1) KeepTopP(z, vocab, row.top_p, shared);
  __syncthreads();
}

// Four random words: Philox4x32-10 with counter (group, position).
__device__ __forceinline__ uint4 Philox(uint64_t seed, int64_t position, uint32_t group) {
  uint32_t c0 = group, c1 = 0, c2 = static_cast<uint32_t>(position);
  uint32_t c3 = static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    const uint32_t a_high = __umulhi(0xd2511f53u, c0), a_low = 0xd2511f53u * c0;
    const uint32_t b_high = __umulhi(0xcd9e8d57u, c2), b_low = 0xcd9e8d57u * c2;
    c0 = b_high ^ c1 ^ k0;
    c1 = b_low;
    c2 = a_high ^ c3 ^ k1;
    c3 = a_low;
  }
  return make_uint4(c0, c1, c2, c3);
}

// The same in every lane of the warp already; told to the compiler, which keeps it out of the lanes' registers.
__device__ __forceinline__ uint32_t Uniform(uint32_t x) { return __reduce_or_sync(~0u, x); }
__device__ __forceinline__ uint64_t Uniform(uint64_t x) {
  return uint64_t{Uniform(static_cast<uint32_t>(x >> 32))} << 32 | Uniform(static_cast<uint32_t>(x));
}

__device__ __forceinline__ uint32_t WordOf(const SamplingRow& row, int64_t token) {
  const uint4 four = Philox(row.seed, row.position, static_cast<uint32_t>(token / 4));
  return token % 4 < 2 ? (token % 4 == 0 ? four.x : four.y) : (token % 4 == 2 ? four.z : four.w);
}

// Bounds of value - temperature ln E, E = -ln(1 - q), of a token with the inverted word w, q = (w + 1/2) / 2^32. Noise
// is at least -3.14, and q <= E <= q + q^2 where q <= 1/2.
struct Bounds {
  float lower;
  float upper;
};
__device__ __forceinline__ Bounds BoundsOf(float value, float temperature, uint32_t inverted) {
  const float q = (static_cast<float>(inverted) + 0.5f) * 0x1p-32f;
  const float margin = 1e-3f * temperature + 0x1p-21f * fabsf(value);
  const float least = q <= 0.5f ? -__logf(q + q * q) : -3.15f;
  return {fminf(value + temperature * least - margin, FLT_MAX), value - temperature * __logf(q) + margin};
}

// fn(token, z, word, bound) for this thread's tokens that are not forbidden. -ln u >= 1 - u bounds the score from
// above.
template <class Fn>
__device__ __forceinline__ void ForNoise(const float* z, int64_t vocab, const SamplingRow& row, const Fn& fn) {
  for (int64_t group = threadIdx.x; group * 4 < vocab; group += kRowThreads) {
    const uint4 four = Philox(row.seed, row.position, static_cast<uint32_t>(group));
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t v = group * 4 + i;
      if (v >= vocab || z[v] == kForbidden) continue;
      fn(v, z[v], words[i], z[v] - logf((static_cast<float>(~words[i]) + 0.5f) * 0x1p-32f));
    }
  }
}

inline __device__ int32_t NoisyArgmax(const float* z, int64_t vocab, const SamplingRow& row, FilterScratch& shared) {
  uint64_t likely = 0;
  uint32_t likely_word = 0;
  ForNoise(z, vocab, row, [&](int64_t v, float, uint32_t word, float bound) {
    const uint64_t rank = RankOf(bound, v);
    if (rank <= likely) return;
    likely = rank;
    likely_word = word;
  });
  const uint64_t best_bound = BlockMax(likely, shared.row);
  if (best_bound == 0) return -1;
  if (likely == best_bound) shared.chosen = likely_word;
  __syncthreads();
  const double least = z[TokenOf(best_bound)] + GumbelNoise(shared.chosen);
  double best_score = -INFINITY;
  uint64_t best = ~uint64_t{0};
  ForNoise(z, vocab, row, [&](int64_t v, float value, uint32_t word, float bound) {
    if (bound + 1e-3f + fabsf(value) * 1e-6f < least) return;
    const double score = value + GumbelNoise(word);
    if (score > best_score) {  // a thread's tokens ascend
      best_score = score;
      best = static_cast<uint64_t>(v);
    }
  });
  const double largest = RowReduce(best_score, shared.row.doubles, [](double a, double b) { return a > b ? a : b; });
  __syncthreads();
  return static_cast<int32_t>(BlockMin(best_score == largest ? best : ~uint64_t{0}, shared.row));
}

}  // namespace millrace::cuda
