// How the KV cache lies in a GPU's memory; known to RopeAppend and PagedAttention alone. k and v alike are
// [block][kv head][segment][token][dim of the segment]: a segment is 64 dims, or the whole head where its size is no
// multiple of 64. A row of 64 dims is one 128-byte line whose eight packs of 16 bytes are permuted by the token, which
// is the tensor cores' own swizzle: a block copied to shared memory as it lies there is read without bank conflicts by
// ldmatrix and is an operand of wgmma. v holds finite values only (RopeAppend sees to it), so that a token with weight
// zero adds zero.
#pragma once

#include "kernels/tensor.h"

namespace millrace::cuda {

__host__ __device__ constexpr int SegmentDims(int head_dim) { return head_dim % 64 == 0 ? 64 : head_dim; }

// Of a token's dim within its block of one kv head, in elements.
__host__ __device__ constexpr int CacheOffset(int head_dim, int token, int dim) {
  if (head_dim % 64 != 0) return token * head_dim + dim;
  return dim / 64 * (kBlockTokens * 64) + token * 64 + ((dim / 8 ^ token) & 7) * 8 + dim % 8;
}

}  // namespace millrace::cuda
