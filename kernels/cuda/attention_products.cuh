// wgmma as the attention of many queries uses it: one warpgroup, 64 rows, operands in the 128-byte swizzle. Thread 4 g
// + t of warp w holds rows 16 w + g and + 8, columns 8 j + 2 t and + 1 in c[4 j .. 4 j + 3].
#pragma once

#include "kernels/cuda/hopper.cuh"

namespace millrace::cuda {

// c[64, 128] or c[64, 64] = a[64, 16] * b[16, columns] (+ c unless !keep), b in shared memory.
__device__ __forceinline__ void MultiplyWeights(float (&c)[64], const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MILLRACE_NAMES64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
      : MILLRACE_SUMS32(0), MILLRACE_SUMS32(32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
__device__ __forceinline__ void MultiplyWeights(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MILLRACE_NAMES32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
      : MILLRACE_SUMS32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

}  // namespace millrace::cuda
