// y[m, n] = sum over c of x[m, c] * w[n, c] + bias[n] for few rows. A block owns 8 kN outputs of up to 64 rows; its
// four warps take one segment of K each, through a ring of stages of their own in shared memory (cp.async, 128-byte
// lines), multiply with mma.sync (x is the 16-row side, weights the 8-column side), and the block adds the four sums in
// order. Bound: bytes, 2 per weight. H200, 2026-11-30, share of a copy's 4230 GB/s at M = 1 / 16 / 64: 4096 -> 28672 89
// / 86 / 51 %, 4096 -> 4096 76 / 74 / 46 %, 1024 -> 4096 45 / 45 / 27 %.
#include <algorithm>

#include "kernels/cuda/linear.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kThreads = kSegments * kWarp;

// kM tiles of 16 rows, kN tiles of 8 outputs.
template <int kM, int kN>
struct Shape {
  static constexpr int kRows = kM * 16 + kN * 8;
  static constexpr int kStageBytes = kRows * kTileBytes;
  static constexpr int kStages = std::clamp(24 * 1024 / kStageBytes, 4, 8);
  static constexpr int kSharedBytes = kSegments * kStages * kStageBytes;
};

// Four rows at once: eight lanes bring one line.
template <int kTiles, bool kPacked>
using Source = ChunkSource<kTiles * 2, 4, kPacked>;  // tiles of 8 rows

template <int kM, int kN, bool kPacked>
__device__ __forceinline__ void LoadStage(uint32_t stage, const Source<2 * kM, kPacked>& x,
                                          const Source<kN, kPacked>& w, int64_t tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int i = 0; i < kM * 4; ++i) x.Load(i, Swizzled(stage, i * 4 + lane / 8, lane % 8), tile);
#pragma unroll
  for (int i = 0; i < kN * 2; ++i) w.Load(i, Swizzled(stage, kM * 16 + i * 4 + lane / 8, lane % 8), tile);
}

template <int kM, int kN>
__device__ __forceinline__ void MultiplyStage(float (&sum)[kM][kN][4], uint32_t stage) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int two = 0; two < kTileK / 32; ++two) {  // two steps of 16
    uint32_t b[kN][4];
#pragma unroll
    for (int n = 0; n < kN; ++n) LoadMatrices(b[n], Swizzled(stage, kM * 16 + n * 8 + lane % 8, two * 4 + lane / 8));
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        uint32_t a[4];
        LoadMatrices(a, Swizzled(stage, m * 16 + lane % 16, two * 4 + s * 2 + lane / 16));
#pragma unroll
        for (int n = 0; n < kN; ++n) Multiply(sum[m][n], a[0], a[1], a[2], a[3], b[n][2 * s], b[n][2 * s + 1]);
      }
    }
  }
}

template <int kM, int kN, class Y, bool kPacked>
__global__ void __launch_bounds__(kThreads) FewRowsKernel(LinearArgs args) {
  AwaitInputs();
  using S = Shape<kM, kN>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first_n = int64_t{blockIdx.x} * kN * 8, first_m = int64_t{blockIdx.y} * kM * 16;
  const int64_t tiles = TilesOf(args.k), per_segment = TilesPerSegment(args.k);
  const int64_t begin = warp * per_segment, end = min(begin + per_segment, tiles);
  const uint32_t ring = SharedAddress(shared) + static_cast<uint32_t>(warp * S::kStages * S::kStageBytes);

  const Source<2 * kM, kPacked> x(args.x, first_m + lane / 8, args.m, args.k, lane % 8);
  const Source<kN, kPacked> w(args.w, first_n + lane / 8, args.n, args.k, lane % 8);

  float sum[kM][kN][4] = {};
  for (int i = 0; i < S::kStages - 1; ++i) {
    if (begin + i < end) LoadStage<kM, kN, kPacked>(ring + static_cast<uint32_t>(i * S::kStageBytes), x, w, begin + i);
    CommitCopies();
  }
  int stage = 0;
  for (int64_t tile = begin; tile < end; ++tile) {
    WaitCopies<S::kStages - 2>();
    __syncwarp();
    const int64_t ahead = tile + S::kStages - 1;
    const int free_stage = stage == 0 ? S::kStages - 1 : stage - 1;
    if (ahead < end) LoadStage<kM, kN, kPacked>(ring + static_cast<uint32_t>(free_stage * S::kStageBytes), x, w, ahead);
    CommitCopies();
    MultiplyStage<kM, kN>(sum, ring + static_cast<uint32_t>(stage * S::kStageBytes));
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  WaitCopies<0>();
  __syncthreads();

  // sums[segment][row][output]
  constexpr int kWidth = kN * 8, kOutputs = kM * 16 * kWidth;
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float* const to = sums + warp * kOutputs + (m * 16 + lane / 4) * kWidth + n * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(sum[m][n][0], sum[m][n][1]);
      *reinterpret_cast<float2*>(to + 8 * kWidth) = make_float2(sum[m][n][2], sum[m][n][3]);
    }
  }
  __syncthreads();
  const int64_t segments = DivideUp(tiles, per_segment);
  for (int i = static_cast<int>(threadIdx.x); i < kOutputs; i += kThreads) {
    const int64_t row = first_m + i / kWidth, n = first_n + i % kWidth;
    if (row >= args.m || n >= args.n) continue;
    float total = sums[i];
    for (int s = 1; s < segments; ++s) total += sums[s * kOutputs + i];
    if (args.bias != nullptr) total += args.bias[n];
    StoreOutput(static_cast<Y*>(args.y) + row * args.n + n, total);
  }
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

template <int kM, int kN, class Y, bool kPacked>
void LaunchShape(const LinearArgs& args, Stream& stream) {
  static_assert(kSegments * kM * 16 * kN * 8 * 4 <= Shape<kM, kN>::kSharedBytes);
  Launch(stream, FewRowsKernel<kM, kN, Y, kPacked>,
         dim3(Grid(DivideUp(args.n, kN * 8)), Grid(DivideUp(args.m, kM * 16))), kThreads, Shape<kM, kN>::kSharedBytes,
         args);
}

}  // namespace

// Few outputs go to narrow blocks, so that every multiprocessor has one.
template <class Y, bool kPacked>
void LinearFewRows(const LinearArgs& args, Stream& stream) {
  if (args.m <= 16) {
    if (args.n <= 2048) return LaunchShape<1, 1, Y, kPacked>(args, stream);
    if (args.n <= 8192) return LaunchShape<1, 2, Y, kPacked>(args, stream);
    return LaunchShape<1, 4, Y, kPacked>(args, stream);
  }
  if (args.m <= 32) return LaunchShape<2, 4, Y, kPacked>(args, stream);
  return LaunchShape<4, 4, Y, kPacked>(args, stream);
}

// --- Instantiations
// ------------------------------------------------------------------------------------------------------

template void LinearFewRows<bf16, true>(const LinearArgs&, Stream&);
template void LinearFewRows<bf16, false>(const LinearArgs&, Stream&);
template void LinearFewRows<float, true>(const LinearArgs&, Stream&);
template void LinearFewRows<float, false>(const LinearArgs&, Stream&);

}  // namespace millrace::cuda
