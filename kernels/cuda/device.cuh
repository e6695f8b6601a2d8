// What the kernels share: launching, packs of bf16, reductions in a fixed order, cp.async, and the tensor core's
// product.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/state.h"
#include "kernels/tensor.h"

namespace millrace::cuda {

constexpr int kWarp = 32;

// Launches on the stream's GPU; nothing waits. The kernel may begin while the one before it still runs, and calls
// AwaitInputs before it touches what others wrote or read.
template <class... P, class... Args>
void Launch(Stream& stream, void (*kernel)(P...), dim3 grid, int threads, size_t shared_bytes, Args... args) {
  State& state = StateOf(stream);
  CheckCuda(cudaSetDevice(state.ordinal), "cudaSetDevice");
  if (shared_bytes > 0) {  // more than 48 KiB, static shared memory included, must be asked for
    CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
              "cudaFuncSetAttribute");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = state.queue;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = 1;
  if (const cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...); error != cudaSuccess) {
    LaunchFailed(error, reinterpret_cast<const void*>(kernel), grid, threads, shared_bytes);
  }
}

inline unsigned Grid(int64_t n) { return static_cast<unsigned>(n); }
__host__ __device__ constexpr int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns when the kernels before this one have ended and their writes are seen; lets the next one begin meanwhile.
// Every thread calls it once. Before it only weights, which nothing writes after start-up, may be read.
__device__ __forceinline__ void AwaitInputs() {
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}

// An invariant that only the GPU can see: stops the kernel, and with it the process.
__device__ __forceinline__ void Require(bool condition) {
  if (!condition) __trap();
}

// --- bf16
// ----------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float LowFloat(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighFloat(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// Rounds to nearest even; `low` goes to the lower address.
__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float ToFloat(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ bf16 Round(float x) {
  bf16 r;
  r.bits = static_cast<uint16_t>(PackPair(x, 0.0f));
  return r;
}

// silu(gate) * up, the same bits wherever it is computed.
__device__ __forceinline__ float SiluMul(float gate, float up) {
  return __fmul_rn(__fdividef(gate, 1.0f + __expf(-gate)), up);
}

// W consecutive values as floats; W is 8 (16-byte accesses) or 1.
template <int W>
__device__ __forceinline__ void LoadPack(const bf16* p, float (&v)[W]) {
  if constexpr (W == 8) {
    const uint4 q = *reinterpret_cast<const uint4*>(p);
    const uint32_t pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = LowFloat(pairs[i]);
      v[2 * i + 1] = HighFloat(pairs[i]);
    }
  } else {
    v[0] = ToFloat(*p);
  }
}
template <int W>
__device__ __forceinline__ void LoadPack(const float* p, float (&v)[W]) {
  if constexpr (W == 8) {
#pragma unroll
    for (int j = 0; j < W; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(p + j);
      v[j] = four.x, v[j + 1] = four.y, v[j + 2] = four.z, v[j + 3] = four.w;
    }
  } else {
    v[0] = *p;
  }
}
template <int W>
__device__ __forceinline__ void StorePack(float* p, const float (&v)[W]) {
  if constexpr (W == 8) {
#pragma unroll
    for (int j = 0; j < W; j += 4) *reinterpret_cast<float4*>(p + j) = make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
  } else {
    *p = v[0];
  }
}
template <int W>
__device__ __forceinline__ void StorePack(bf16* p, const float (&v)[W]) {
  if constexpr (W == 8) {
    *reinterpret_cast<uint4*>(p) =
        make_uint4(PackPair(v[0], v[1]), PackPair(v[2], v[3]), PackPair(v[4], v[5]), PackPair(v[6], v[7]));
  } else {
    *p = Round(v[0]);
  }
}

// Whether rows of `cols` values at p can be read 16 bytes at a time.
template <class T>
__host__ __device__ bool InPacks(const T* p, int64_t cols) {
  return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(cols) * sizeof(T)) % 16 == 0;
}

// --- Reductions
// ----------------------------------------------------------------------------------------------------------

template <class T, class Fn>
__device__ __forceinline__ T WarpReduce(T x, const Fn& fn) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fn(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// The same value in every thread: warps by shuffles, then warp by warp. `shared` holds one T per warp.
template <class T, class Fn>
__device__ __forceinline__ T BlockReduce(T x, T* shared, const Fn& fn) {
  x = WarpReduce(x, fn);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  T all = shared[0];
  for (unsigned w = 1; w < blockDim.x / kWarp; ++w) all = fn(all, shared[w]);
  return all;
}

// The sum of x over the threads before this one, and over all. `shared` holds one T per warp.
template <class T>
__device__ __forceinline__ T BlockScan(T x, T* shared, T& total) {
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  T sum = x;
#pragma unroll
  for (unsigned distance = 1; distance < kWarp; distance *= 2) {
    const T before = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += before;
  }
  __syncthreads();
  if (lane == kWarp - 1) shared[warp] = sum;
  __syncthreads();
  T before = 0;
  total = 0;
  for (unsigned w = 0; w < blockDim.x / kWarp; ++w) {
    if (w == warp) before = total;
    total += shared[w];
  }
  return before + sum - x;
}

// --- Shared memory and tensor cores
// --------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory, or zeros if !valid.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// The same under a policy of the second-level cache (hopper.cuh).
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool valid, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of the committed groups are under way.
template <int N>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c[16, 8] += a[16, 16] * b[16, 8]: thread 4 g + t holds c(g, 2t..), c(g + 8, 2t..).
__device__ __forceinline__ void Multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace millrace::cuda
