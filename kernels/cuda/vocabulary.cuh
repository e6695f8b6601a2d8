// Passes over a row of logits by one block of 1024 threads; thread i takes elements i, i + 1024, …. Files that use this
// are compiled without contraction of a * b + c, so that values and tokens equal the CPU's bit for bit.
#pragma once

#include "kernels/cuda/device.cuh"

namespace millrace::cuda {

constexpr int kRowThreads = 1024;

// fn(v) for this thread's v < count.
template <class Fn>
__device__ __forceinline__ void ForRow(int64_t count, const Fn& fn) {
#pragma unroll 4
  for (int64_t v = threadIdx.x; v < count; v += kRowThreads) fn(v);
}

// Orders as the values do.
__device__ __forceinline__ uint32_t KeyOf(float value) {
  const uint32_t u = __float_as_uint(value);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float ValueOf(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// Orders by value, of equals the lower token last: the largest rank is the first largest. The zeros are equal.
__device__ __forceinline__ uint64_t RankOf(float value, int64_t token) {
  return uint64_t{KeyOf(value + 0.0f)} << 32 | static_cast<uint32_t>(~token);
}
__device__ __forceinline__ int64_t TokenOf(uint64_t rank) { return static_cast<uint32_t>(~rank); }

// One value per warp for RowReduce and RowScan.
union RowScratch {
  uint64_t words[kRowThreads / kWarp];
  double doubles[kRowThreads / kWarp];
};

// BlockReduce and BlockScan for 32 warps: the second step is a warp's too.
template <class T, class Fn>
__device__ __forceinline__ T RowReduce(T x, T* shared, const Fn& fn) {
  x = WarpReduce(x, fn);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  static_assert(kRowThreads == kWarp * kWarp);
  return WarpReduce(shared[threadIdx.x % kWarp], fn);
}
template <class T>
__device__ __forceinline__ T WarpScan(T x) {  // the sum up to this lane's
#pragma unroll
  for (unsigned distance = 1; distance < kWarp; distance *= 2) {
    const T before = __shfl_up_sync(~0u, x, distance);
    if (threadIdx.x % kWarp >= distance) x += before;
  }
  return x;
}
template <class T>
__device__ __forceinline__ T RowScan(T x, T* shared, T& total) {
  const T sum = WarpScan(x);
  __syncthreads();
  if (threadIdx.x % kWarp == kWarp - 1) shared[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const T of_warp = shared[threadIdx.x % kWarp], through = WarpScan(of_warp);
  total = __shfl_sync(~0u, through, kWarp - 1);
  return __shfl_sync(~0u, through - of_warp, threadIdx.x / kWarp) + sum - x;
}

__device__ __forceinline__ uint64_t BlockMax(uint64_t x, RowScratch& scratch) {
  return RowReduce(x, scratch.words, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}
__device__ __forceinline__ uint64_t BlockMin(uint64_t x, RowScratch& scratch) { return ~BlockMax(~x, scratch); }
__device__ __forceinline__ uint64_t BlockSum(uint64_t x, RowScratch& scratch) {
  return RowReduce(x, scratch.words, [](uint64_t a, uint64_t b) { return a + b; });
}

// The largest rank of a row.
__device__ __forceinline__ uint64_t LargestRank(const float* x, int64_t count, RowScratch& scratch) {
  uint64_t largest = 0;
  ForRow(count, [&](int64_t v) { largest = max(largest, RankOf(x[v], v)); });
  return BlockMax(largest, scratch);
}

// e^x as the CPU's lanes compute it, to the bit: x = n ln 2 + r, a polynomial in r, n added to the exponent.
__device__ __forceinline__ float Exp(float x) {
  if (x < -87.0f) return 0.0f;
  if (x > 88.37f) return INFINITY;
  const float shifted = __fmaf_rn(x, 1.44269504088896341f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  float r = __fmaf_rn(n, -0.693145751953125f, x);
  r = __fmaf_rn(n, -1.42860682030941723e-6f, r);
  float p = 1.0f / 5040;
  p = __fmaf_rn(p, r, 1.0f / 720);
  p = __fmaf_rn(p, r, 1.0f / 120);
  p = __fmaf_rn(p, r, 1.0f / 24);
  p = __fmaf_rn(p, r, 1.0f / 6);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

}  // namespace millrace::cuda
