// The copy engine's views of matrices: what it brings and stores at once. Made on the host, for each launch.
#pragma once

#include <algorithm>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/linear.cuh"

namespace millrace::cuda {

// The copy engine's view of a matrix: `sizes` and `box` in elements, `pitches` in bytes, of which the box's first line
// has `line`.
template <int kRank, class T>
CUtensorMap Encode(const T* matrix, const cuuint64_t (&sizes)[kRank], const cuuint64_t (&pitches)[kRank - 1],
                   const cuuint32_t (&box)[kRank]) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    CheckCuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
              "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1u);
  CUtensorMap map;
  const CUresult result =
      encode(&map, sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kRank,
             const_cast<std::remove_const_t<T>*>(matrix), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box[0] * sizeof(T) == kTileBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CheckCuda(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
  return map;
}

// Of a matrix whose rows start at multiples of 16 bytes: boxes of `box_bytes` by `box_rows`.
template <class T>
CUtensorMap MapOf(const T* matrix, int64_t rows, int64_t cols, int box_rows, int box_bytes = kTileBytes) {
  return Encode<2>(
      matrix, {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)},
      {static_cast<cuuint64_t>(cols) * sizeof(T)},
      {static_cast<cuuint32_t>(box_bytes) / static_cast<cuuint32_t>(sizeof(T)), static_cast<cuuint32_t>(box_rows)});
}

// Of weights whose halves are gates and what they gate: eight rows of one half, the same eight of the other, and so on.
inline CUtensorMap MapOfGated(const bf16* weights, int64_t rows, int64_t cols, int box_rows) {
  const auto pitch = static_cast<cuuint64_t>(cols) * sizeof(bf16);
  return Encode<4>(weights, {static_cast<cuuint64_t>(cols), 8, 2, static_cast<cuuint64_t>(rows) / 16},
                   {pitch, pitch * static_cast<cuuint64_t>(rows) / 2, pitch * 8},
                   {kTileK, 8, 2, static_cast<cuuint32_t>(box_rows) / 16});
}

}  // namespace millrace::cuda
