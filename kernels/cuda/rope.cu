// q and k heads: x = x / sqrt(mean(x^2) + eps) * norm, then (a, b) = (x[i], x[i + D/2]) becomes (a cos - b sin, b cos +
// a sin). k and v go to the cache: k [block][kv head][token][dim], v [block][kv head][dim][token], so that attention
// reads both straight into the tensor core's registers. One block per row, one warp per head at a time; lane l takes
// the pairs l, l + 32, …. Bound: bytes, 4 per element of q, 2 per element of k and v read and 2 written. Not measured.
#include "kernels/check.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kMaxPairs = 4;  // of a lane: head dims up to 256

struct RopeArgs {
  bf16* qkv;
  KvLayer<bf16> kv;
  const float* q_norm;  // null: none
  const float* k_norm;
  float eps;
  RopeTable rope;
  const int32_t* positions;
  const int32_t* slots;
  int heads;
};

// Pair p of this lane is (lane + 32 p, lane + 32 p + half).
__device__ void LoadPairs(const bf16* head, int half, float (&a)[kMaxPairs], float (&b)[kMaxPairs]) {
#pragma unroll
  for (int p = 0; p < kMaxPairs; ++p) {
    const int i = static_cast<int>(threadIdx.x) % kWarp + kWarp * p;
    a[p] = i < half ? ToFloat(head[i]) : 0.0f;
    b[p] = i < half ? ToFloat(head[i + half]) : 0.0f;
  }
}

__device__ void Normalise(float (&a)[kMaxPairs], float (&b)[kMaxPairs], const float* norm, int half, float eps) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < kMaxPairs; ++p) sum = __fmaf_rn(b[p], b[p], __fmaf_rn(a[p], a[p], sum));
  sum = WarpReduce(sum, [](float x, float y) { return x + y; });
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(2 * half) + eps);
#pragma unroll
  for (int p = 0; p < kMaxPairs; ++p) {
    const int i = static_cast<int>(threadIdx.x) % kWarp + kWarp * p;
    if (i >= half) continue;
    a[p] = ToFloat(Round(a[p] * scale * norm[i]));
    b[p] = ToFloat(Round(b[p] * scale * norm[i + half]));
  }
}

__device__ __forceinline__ void Rotate(float& a, float& b, float cos, float sin) {
  const float x = a;
  a = __fsub_rn(__fmul_rn(x, cos), __fmul_rn(b, sin));
  b = __fadd_rn(__fmul_rn(b, cos), __fmul_rn(x, sin));
}

__global__ void __launch_bounds__(kThreads) RopeAppendKernel(RopeArgs args) {
  AwaitInputs();
  const int dim = args.kv.head_dim, half = dim / 2, kv_heads = args.kv.num_kv_heads;
  const int64_t t = blockIdx.x;
  const int64_t position = args.positions[t], slot = args.slots[t];
  Require(position >= 0 && position < args.rope.cos.rows && slot < args.kv.num_blocks * kBlockTokens);
  const float* cos = args.rope.cos.data + position * half;
  const float* sin = args.rope.sin.data + position * half;
  bf16* const row = args.qkv + t * (args.heads + 2 * kv_heads) * dim;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int h = static_cast<int>(threadIdx.x) / kWarp; h < args.heads + 2 * kv_heads; h += kThreads / kWarp) {
    const bool is_q = h < args.heads, is_v = h >= args.heads + kv_heads;
    if (!is_q && slot < 0) continue;
    float a[kMaxPairs], b[kMaxPairs];
    LoadPairs(row + int64_t{h} * dim, half, a, b);
    const float* norm = is_q ? args.q_norm : args.k_norm;
    if (!is_v && norm != nullptr) Normalise(a, b, norm, half, args.eps);
    const int64_t head = is_q ? 0 : slot / kBlockTokens * kv_heads + (h - args.heads) % kv_heads;
    bf16* to = is_q   ? row + int64_t{h} * dim
               : is_v ? args.kv.v + head * kBlockTokens * dim + slot % kBlockTokens
                      : args.kv.k + (head * kBlockTokens + slot % kBlockTokens) * dim;
    const int64_t stride = is_v ? kBlockTokens : 1;
#pragma unroll
    for (int p = 0; p < kMaxPairs; ++p) {
      const int i = lane + kWarp * p;
      if (i >= half) continue;
      if (!is_v) Rotate(a[p], b[p], cos[i], sin[i]);
      to[i * stride] = Round(a[p]);
      to[(i + half) * stride] = Round(b[p]);
    }
  }
}

}  // namespace

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

void RopeAppend(Mat<bf16> qkv, KvLayer<bf16> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                RopeTable rope, Vec<const int32_t> positions, Vec<const int32_t> slots, Stream& stream) {
  if (qkv.rows == 0) return;
  MILLRACE_CHECK(kv.head_dim <= 2 * kMaxPairs * kWarp, "a warp holds a head", kv.head_dim);
  const int heads = static_cast<int>(qkv.cols / kv.head_dim) - 2 * kv.num_kv_heads;
  const RopeArgs args{qkv.data,
                      kv,
                      q_norm.size == 0 ? nullptr : q_norm.data,
                      k_norm.size == 0 ? nullptr : k_norm.data,
                      eps,
                      rope,
                      positions.data,
                      slots.data,
                      heads};
  Launch(stream, RopeAppendKernel, Grid(qkv.rows), kThreads, 0, args);
}

}  // namespace millrace::cuda
