// What the kernels of Linear agree on, so that a row's bits do not depend on which of them computed it:
//   K is cut into tiles of 64 (the last one padded with zeros) and the tiles into at most four segments of equal
//   length; a segment is one chain of tensor-core steps of 16 in ascending order, begun at zero; the segments are added
//   in order.
#pragma once

#include "kernels/cuda/hopper.cuh"

namespace millrace::cuda {

constexpr int kTileK = 64;  // one 128-byte line of a row
constexpr int kTileBytes = kTileK * 2;
constexpr int kSegments = 4;

struct LinearArgs {
  const bf16* x;      // [m, k]
  const bf16* w;      // [n, k]
  const float* bias;  // null: none
  void* y;            // [m, n]
  int64_t m, n, k;
};

// A row of x as what it is the norm of: RmsNorm(residual + delta), in the bits of rows.cu.
struct NormedArgs {
  const float* residual;  // [m, k]
  const float* delta;     // null: zero
  const float* weight;    // [k]
  float* sum;             // [m, k], not the residual: other blocks still read it
  float eps;
};

__host__ __device__ constexpr int64_t TilesOf(int64_t k) { return DivideUp(k, kTileK); }
__host__ __device__ constexpr int64_t TilesPerSegment(int64_t k) { return DivideUp(TilesOf(k), kSegments); }

// The shared-memory address of 16-byte chunk c of row r: chunks are permuted within their row so that eight rows' equal
// chunks lie in different banks. This is the tensor cores' own 128-byte swizzle where `base` is a multiple of 1024.
__device__ __forceinline__ uint32_t Swizzled(uint32_t base, int r, int c) {
  return base + static_cast<uint32_t>(r * kTileBytes + ((c ^ (r & 7)) << 4));
}

// What one thread brings of a tile: chunk c of kCount rows, kStep rows apart. kPacked: rows start at multiples of 16
// bytes. kReadOnce: its lines are the first to leave the second-level cache.
template <int kCount, int kStep, bool kPacked, bool kReadOnce>
struct ChunkSource {
  const bf16* first;  // the first row's chunk of tile 0
  int64_t k;
  int chunk;
  uint64_t policy = 0;   // if kReadOnce
  uint32_t present = 0;  // bit i: row i lies in the matrix

  __device__ __forceinline__ ChunkSource(const bf16* matrix, int64_t row, int64_t rows, int64_t row_length, int c)
      : first(matrix + row * row_length + c * 8), k(row_length), chunk(c) {
    if constexpr (kReadOnce) policy = CachePolicy(true);
#pragma unroll
    for (int i = 0; i < kCount; ++i) present |= row + i * kStep < rows ? 1u << i : 0u;
  }

  // To row i's place at `to`; beyond the matrix are zeros.
  __device__ __forceinline__ void Load(int i, uint32_t to, int64_t tile) const {
    const int64_t at = tile * kTileK + chunk * 8;
    const bool in_matrix = (present >> i & 1u) != 0;
    const bf16* from = first + i * (kStep * k) + tile * kTileK;
    if constexpr (kPacked) {
      const bool valid = in_matrix && at < k;
      if constexpr (kReadOnce) {
        CopyAsync16(to, valid ? from : first, valid, policy);
      } else {
        CopyAsync16(to, valid ? from : first, valid);
      }
    } else {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t low = in_matrix && at + 2 * j < k ? from[2 * j].bits : 0u;
        const uint32_t high = in_matrix && at + 2 * j + 1 < k ? from[2 * j + 1].bits : 0u;
        pairs[j] = low | high << 16;
      }
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
                   "r"(pairs[3])
                   : "memory");
    }
  }
};

__device__ __forceinline__ void StoreOutput(float* y, float value) { *y = value; }
__device__ __forceinline__ void StoreOutput(bf16* y, float value) { *y = Round(value); }
__device__ __forceinline__ void StoreOutputs(float* y, float4 v) { *reinterpret_cast<float4*>(y) = v; }
__device__ __forceinline__ void StoreOutputs(bf16* y, float4 v) {
  *reinterpret_cast<uint2*>(y) = make_uint2(PackPair(v.x, v.y), PackPair(v.z, v.w));
}

// All of a multiprocessor's memory as shared memory, for every shape of kernel alike: the four products of a layer of
// Qwen3-0.6B took 18.1 us at one row with it and 19.1 without, in runs of their own. Presumably memory is divided anew
// only where nothing runs.
template <class... P>
void PreferSharedMemory(void (*kernel)(P...)) {
  CheckCuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      "cudaFuncSetAttribute");
}

// For the products of small models: a layer's by one block a multiprocessor, and the vocabulary's.
constexpr int64_t kResidentBlocks = 132;
constexpr int64_t kMostResidentRows = 3;
constexpr int64_t kMaxResidentK = 1024;  // where x is normalised
// y = x W^T (+ bias) in float.
constexpr bool IsResident(int64_t m, int64_t n, int64_t k) {
  return m <= kMostResidentRows &&
         ((n <= kResidentBlocks * 8 && TilesPerSegment(k) <= 12) ||
          (n <= kResidentBlocks * 16 && TilesPerSegment(k) <= 8) || (n > 16384 && TilesPerSegment(k) <= 4));
}
void LinearResident(const LinearArgs& args, Stream& stream);
// Of normalised x: y in bf16; and y [m, n / 2] = SiluMul of the product.
constexpr bool IsNormResident(int64_t m, int64_t n, int64_t k) {
  return m <= kMostResidentRows && n <= kResidentBlocks * 48 && k <= kMaxResidentK;
}
void NormLinearResident(const LinearArgs& args, const NormedArgs& normed, Stream& stream);
void NormGateUpResident(const LinearArgs& args, const NormedArgs& normed, Stream& stream);

// Up to 32 rows, and any number; their rows and the weights' start at multiples of 16 bytes.
template <class Y>
void LinearFewRows(const LinearArgs& args, Stream& stream);
template <class Y>
void LinearManyRows(const LinearArgs& args, Stream& stream);
// More than a few rows: y [m, n / 2] = SiluMul of the product, in bf16; n a multiple of 16, and the rows of y start at
// multiples of 16 bytes too.
void LinearGated(const LinearArgs& args, Stream& stream);
// Any rows, and any alignment.
template <class Y>
void LinearUnaligned(const LinearArgs& args, Stream& stream);

}  // namespace millrace::cuda
