// q and k heads: x = x / sqrt(mean(x^2) + eps) * norm, then (a, b) = (x[i], x[i + D/2]) becomes (a cos - b sin, b cos +
// a sin). k and v go to the cache (attention_cache.cuh). A group of lanes takes one q head, or four where rows
// are many, or one kv head of a row, k and v together, so that a token whose v is not finite can be told in k: v's such
// values are stored as zeros and k as NaN, which makes the token's weight NaN for the rows that see it and leaves the
// others alone. Lane l of a group has the pairs 4 l .. 4 l + 3. Bound: bytes, 4 per element of q, 2 per element of k
// and v read and 2 written. H200, 2026-11-30, 16 heads, 8 kv heads of 128: 1.4 us for one row, 2.1 for 64; 61 % of a
// copy's 4228 GB/s for 2048 with one head to a group, which in a prefill of 2048 rows of 32 heads takes 22.9 us
// (2026-12-01).
#include "kernels/check.h"
#include "kernels/cuda/attention_cache.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kPairs = 4;  // of a lane

struct RopeArgs {
  bf16* qkv;
  KvLayer<bf16> kv;
  const float* q_norm;  // null: none
  const float* k_norm;
  float eps;
  RopeTable rope;
  const int32_t* positions;
  const int32_t* slots;
  uint32_t units;  // of all rows
  int heads;
};

// Four consecutive values of a row of halves, 8 bytes.
__device__ __forceinline__ void LoadFour(const bf16* p, float (&v)[kPairs]) {
  const uint2 q = *reinterpret_cast<const uint2*>(p);
  v[0] = LowFloat(q.x);
  v[1] = HighFloat(q.x);
  v[2] = LowFloat(q.y);
  v[3] = HighFloat(q.y);
}
__device__ __forceinline__ void StoreFour(bf16* p, const float (&v)[kPairs]) {
  *reinterpret_cast<uint2*>(p) = make_uint2(PackPair(v[0], v[1]), PackPair(v[2], v[3]));
}
__device__ __forceinline__ void LoadFour(const float* p, float (&v)[kPairs]) {
  const float4 q = __ldg(reinterpret_cast<const float4*>(p));
  v[0] = q.x;
  v[1] = q.y;
  v[2] = q.z;
  v[3] = q.w;
}

// Over the lanes of a group.
template <int kLanes, class T, class Fn>
__device__ __forceinline__ T GroupReduce(T x, const Fn& fn) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x = fn(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

template <int kLanes>
__device__ __forceinline__ void Normalise(float (&a)[kPairs], float (&b)[kPairs], const float (&norm_a)[kPairs],
                                          const float (&norm_b)[kPairs], int dim, float eps) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) sum = __fmaf_rn(b[p], b[p], __fmaf_rn(a[p], a[p], sum));
  sum = GroupReduce<kLanes>(sum, [](float x, float y) { return x + y; });
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    a[p] = ToFloat(Round(a[p] * scale * norm_a[p]));
    b[p] = ToFloat(Round(b[p] * scale * norm_b[p]));
  }
}

__device__ __forceinline__ void Rotate(float (&a)[kPairs], float (&b)[kPairs], const float (&cos)[kPairs],
                                       const float (&sin)[kPairs]) {
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const float x = a[p];
    a[p] = __fsub_rn(__fmul_rn(x, cos[p]), __fmul_rn(b[p], sin[p]));
    b[p] = __fadd_rn(__fmul_rn(b[p], cos[p]), __fmul_rn(x, sin[p]));
  }
}

// Zeros in place of what is not finite; whether anything was not.
__device__ __forceinline__ bool MakeFinite(float (&v)[kPairs]) {
  bool found = false;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const bool finite = fabsf(v[p]) < INFINITY;
    found |= !finite;
    if (!finite) v[p] = 0;
  }
  return found;
}

// Half-vectors of a head in the lane's registers: pairs of a and b.
struct Head {
  float a[kPairs] = {}, b[kPairs] = {};
  __device__ __forceinline__ void Load(const bf16* first, int half) {
    LoadFour(first, a);
    LoadFour(first + half, b);
  }
  __device__ __forceinline__ void Store(bf16* to, bf16* to_half) const {
    StoreFour(to, a);
    StoreFour(to_half, b);
  }
};

// A group of kLanes lanes per unit: kHeads heads of q, which share what they are rotated by, or k and v of one kv head.
// Lanes beyond the head's half have nothing.
template <int kLanes, int kHeads>
__global__ void __launch_bounds__(256) RopeAppendKernel(RopeArgs args) {
  AwaitInputs();
  constexpr int kMost = kHeads > 2 ? kHeads : 2;
  const int dim = args.kv.head_dim, half = dim / 2, kv_heads = args.kv.num_kv_heads, groups = args.heads / kHeads;
  const auto per_row = static_cast<uint32_t>(groups + kv_heads);
  const uint32_t unit = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes, own = min(unit, args.units - 1);
  const int64_t t = own / per_row;  // of 32 bits: a division of 64 takes as long as all else
  const int in_row = static_cast<int>(own % per_row), i = static_cast<int>(threadIdx.x) % kLanes * kPairs;
  const bool is_q = in_row < groups, present = unit < args.units && i < half;
  const int64_t position = args.positions[t], slot = args.slots[t];
  const int kv_head = in_row - groups, held = is_q ? kHeads : 2, stride = is_q ? dim : kv_heads * dim;
  bf16* const x =
      args.qkv + (t * (args.heads + 2 * kv_heads) + (is_q ? in_row * kHeads : args.heads + kv_head)) * dim + i;
  Head heads[kMost], norm;
  const float* const weights = is_q ? args.q_norm : args.k_norm;
  if (present) {
#pragma unroll
    for (int h = 0; h < kMost; ++h) {
      if (h < held) heads[h].Load(x + h * stride, half);
    }
    if (weights != nullptr) {
      LoadFour(weights + i, norm.a);
      LoadFour(weights + i + half, norm.b);
    }
  }
  Require(position >= 0 && position < args.rope.cos.rows && slot < args.kv.num_blocks * kBlockTokens);
  float cos[kPairs] = {}, sin[kPairs] = {};
  if (present) {
    LoadFour(args.rope.cos.data + position * half + i, cos);
    LoadFour(args.rope.sin.data + position * half + i, sin);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {  // a group's lanes agree on what is done, a warp's do not
    Head normal = heads[h];
    Normalise<kLanes>(normal.a, normal.b, norm.a, norm.b, dim, args.eps);
    if (h > 0 && !is_q) continue;
    if (weights != nullptr) heads[h] = normal;
    Rotate(heads[h].a, heads[h].b, cos, sin);
  }
  bool found = false;
  if (!is_q) found = MakeFinite(heads[1].a) | MakeFinite(heads[1].b);
  const bool poison = GroupReduce<kLanes>(found ? 1 : 0, [](int p, int q) { return p | q; }) != 0;
  if (!present) return;
  if (is_q) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) heads[h].Store(x + h * dim, x + h * dim + half);
    return;
  }
  if (slot < 0) return;
  if (poison) {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) heads[0].a[p] = heads[0].b[p] = NAN;
  }
  const int token = static_cast<int>(slot % kBlockTokens);
  const int64_t block = (slot / kBlockTokens * kv_heads + kv_head) * (kBlockTokens * dim);
  const int64_t to = block + CacheOffset(dim, token, i), to_half = block + CacheOffset(dim, token, i + half);
  heads[0].Store(args.kv.k + to, args.kv.k + to_half);
  heads[1].Store(args.kv.v + to, args.kv.v + to_half);
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

template <int kLanes, int kHeads>
void LaunchHeads(RopeArgs args, int64_t rows, Stream& stream) {
  args.units = static_cast<uint32_t>(rows * (args.heads / kHeads + args.kv.num_kv_heads));
  const int64_t lanes = int64_t{args.units} * kLanes;
  MILLRACE_CHECK(lanes <= int64_t{1} << 31, "lanes are counted in 32 bits", lanes);
  // Few rows are spread over the processors.
  const int threads = lanes <= 128 * 132 ? 64 : 256;
  Launch(stream, RopeAppendKernel<kLanes, kHeads>, Grid(DivideUp(lanes, threads)), threads, 0, args);
}

template <int kLanes>
void LaunchRope(const RopeArgs& args, int64_t rows, Stream& stream) {
  constexpr int64_t kManyRows = 512;
  constexpr int kTogether = 4;
  if (rows < kManyRows || args.heads % kTogether != 0) return LaunchHeads<kLanes, 1>(args, rows, stream);
  LaunchHeads<kLanes, kTogether>(args, rows, stream);
}

}  // namespace

void RopeAppend(Mat<bf16> qkv, KvLayer<bf16> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                RopeTable rope, Vec<const int32_t> positions, Vec<const int32_t> slots, Stream& stream) {
  if (qkv.rows == 0) return;
  MILLRACE_CHECK(kv.head_dim % (2 * kPairs) == 0 && kv.head_dim <= 128, "lanes hold a head in fours", kv.head_dim);
  const int heads = static_cast<int>(qkv.cols / kv.head_dim) - 2 * kv.num_kv_heads;
  const RopeArgs args{qkv.data,
                      kv,
                      q_norm.size == 0 ? nullptr : q_norm.data,
                      k_norm.size == 0 ? nullptr : k_norm.data,
                      eps,
                      rope,
                      positions.data,
                      slots.data,
                      0,
                      heads};
  const int lanes = kv.head_dim / (2 * kPairs);
  if (lanes <= 2) return LaunchRope<2>(args, qkv.rows, stream);
  if (lanes <= 4) return LaunchRope<4>(args, qkv.rows, stream);
  if (lanes <= 8) return LaunchRope<8>(args, qkv.rows, stream);
  LaunchRope<16>(args, qkv.rows, stream);
}

}  // namespace millrace::cuda
