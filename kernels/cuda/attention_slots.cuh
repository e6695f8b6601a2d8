// How the chunks of a tile that several blocks shared become its result.
#pragma once

#include "kernels/cuda/attention_plan.cuh"

namespace millrace::cuda {

// Combines what slots hold of a tile: the prefix, then chunk by chunk. Each of
// kThreads threads takes four dims of a query at a time.
template <int D, int kThreads>
__device__ __forceinline__ void CombineSlots(const AttentionArgs& args, const Span& span) {
  constexpr int kAtOnce = 8;  // chunks whose loads are under way together
  for (int i = static_cast<int>(threadIdx.x); i < span.tile.queries * (D / 4); i += kThreads) {
    const int query = i / (D / 4), dim = i % (D / 4) * 4;
    MaxSum state;
    float total[4] = {};
    for (int begin = span.prefix - 1; begin < span.chunks; begin += kAtOnce) {
      float2 states[kAtOnce];
      float4 outs[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t slot = span.slot + min(begin + j, span.chunks - 1);
        states[j] = __ldcg(args.slot_states + slot * args.tile_queries + query);
        outs[j] = __ldcg(reinterpret_cast<const float4*>(args.slot_out + (slot * args.tile_queries + query) * D + dim));
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (begin + j >= span.chunks) continue;
        float keep_old, keep_new;
        state = Combine(state, MaxSum{states[j].x, states[j].y}, keep_old, keep_new);
        total[0] = CombineOut(total[0], keep_old, outs[j].x, keep_new);
        total[1] = CombineOut(total[1], keep_old, outs[j].y, keep_new);
        total[2] = CombineOut(total[2], keep_old, outs[j].z, keep_new);
        total[3] = CombineOut(total[3], keep_old, outs[j].w, keep_new);
      }
    }
    const float scale = __frcp_rn(state.sum);
    *reinterpret_cast<uint2*>(span.tile.Out(args, query) + dim) =
        make_uint2(PackPair(total[0] * scale, total[1] * scale), PackPair(total[2] * scale, total[3] * scale));
  }
}

}  // namespace millrace::cuda
