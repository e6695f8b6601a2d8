// y[m, n] = sum over c of x[m, c] * w[n, c] + bias[n] for few rows. A block owns 8 kN outputs of 8 kX rows; its four
// warps take one segment of K each, through a ring of stages of their own in shared memory (cp.async, 128-byte lines),
// multiply with mma.sync (x is the 16-row side, weights the 8-column side), and the block adds the four sums in order.
// The first ring of weights is under way before the inputs are ready. Bound: bytes, 2 per weight. H200, 2026-11-30,
// share of a copy's 4228 GB/s at M = 1 / 16: 4096 -> 24576 102 / 95 %, 12288 -> 4096 100 / 95 %, 4096 -> 4096 93 / 84
// %, 4096 -> 151936 106 / 100 %, 1024 -> 4096 62 / 57 %, 2048 -> 1024 32 / 33 % (3.1 us, latency).
#include <algorithm>

#include "kernels/cuda/linear.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kThreads = kSegments * kWarp;

// kX tiles of 8 rows of x (one, two or four), kN tiles of 8 outputs, kib KiB for each warp's ring.
template <int kX, int kN, int kib>
struct Shape {
  static constexpr int kStageBytes = (kX + kN) * 8 * kTileBytes;
  static constexpr int kStages = std::clamp(kib * 1024 / kStageBytes, 2, 16);
};

// Four rows at once: eight lanes bring one line.
template <int kTiles, bool kPacked, bool kReadOnce>
using Source = ChunkSource<kTiles * 2, 4, kPacked, kReadOnce>;  // tiles of 8 rows

// The stage's rows from `first_row` on.
template <int kTiles, bool kPacked, bool kReadOnce>
__device__ __forceinline__ void LoadTiles(uint32_t stage, int first_row, const Source<kTiles, kPacked, kReadOnce>& rows,
                                          int64_t tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int i = 0; i < kTiles * 2; ++i) rows.Load(i, Swizzled(stage, first_row + i * 4 + lane / 8, lane % 8), tile);
}

template <int kX, int kN>
__device__ __forceinline__ void MultiplyStage(float (&sum)[(kX + 1) / 2][kN][4], uint32_t stage) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int two = 0; two < kTileK / 32; ++two) {  // two steps of 16
    uint32_t a[kX][4], b[kN][4];                 // of eight rows, both steps
#pragma unroll
    for (int i = 0; i < kX; ++i) LoadMatrices(a[i], Swizzled(stage, i * 8 + lane % 8, two * 4 + lane / 8));
#pragma unroll
    for (int n = 0; n < kN; ++n) LoadMatrices(b[n], Swizzled(stage, (kX + n) * 8 + lane % 8, two * 4 + lane / 8));
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int m = 0; m < (kX + 1) / 2; ++m) {
        const auto upper = [&](int i) { return kX == 1 ? 0u : a[(2 * m + 1) % kX][i]; };
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          Multiply(sum[m][n], a[2 * m][2 * s], upper(2 * s), a[2 * m][2 * s + 1], upper(2 * s + 1), b[n][2 * s],
                   b[n][2 * s + 1]);
        }
      }
    }
  }
}

// kReadOnce: the weights are the first to leave the second-level cache.
template <int kX, int kN, int kib, class Y, bool kPacked, bool kReadOnce>
__global__ void __launch_bounds__(kThreads) FewRowsKernel(LinearArgs args, int ring_bytes) {
  using S = Shape<kX, kN, kib>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first_n = int64_t{blockIdx.x} * kN * 8, first_m = int64_t{blockIdx.y} * kX * 8;
  const int64_t tiles = TilesOf(args.k), per_segment = TilesPerSegment(args.k);
  const int64_t begin = warp * per_segment, end = min(begin + per_segment, tiles);
  const uint32_t ring = SharedAddress(shared) + static_cast<uint32_t>(warp * ring_bytes);
  const auto stage_at = [ring](int i) { return ring + static_cast<uint32_t>(i * S::kStageBytes); };
  const Source<kX, kPacked, false> x(args.x, first_m + lane / 8, args.m, args.k, lane % 8);
  const Source<kN, kPacked, kReadOnce> w(args.w, first_n + lane / 8, args.n, args.k, lane % 8);

  for (int i = 0; i < S::kStages; ++i) {
    if (begin + i < end) LoadTiles<kN, kPacked, kReadOnce>(stage_at(i), kX * 8, w, begin + i);
  }
  AwaitInputs();
  float sum[(kX + 1) / 2][kN][4] = {};
  for (int i = 0; i < S::kStages; ++i) {
    if (begin + i < end) LoadTiles<kX, kPacked, false>(stage_at(i), 0, x, begin + i);
    CommitCopies();
  }
  int stage = 0;
  for (int64_t tile = begin; tile < end; ++tile) {
    WaitCopies<S::kStages - 1>();
    __syncwarp();
    MultiplyStage<kX, kN>(sum, stage_at(stage));
    __syncwarp();
    const int64_t ahead = tile + S::kStages;
    if (ahead < end) {
      LoadTiles<kN, kPacked, kReadOnce>(stage_at(stage), kX * 8, w, ahead);
      LoadTiles<kX, kPacked, false>(stage_at(stage), 0, x, ahead);
    }
    CommitCopies();
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  __syncthreads();

  // sums[segment][row][output]
  constexpr int kWidth = kN * 8, kOutputs = kX * 8 * kWidth;
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < (kX + 1) / 2; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float* const to = sums + warp * kOutputs + (m * 16 + lane / 4) * kWidth + n * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(sum[m][n][0], sum[m][n][1]);
      if constexpr (kX > 1) *reinterpret_cast<float2*>(to + 8 * kWidth) = make_float2(sum[m][n][2], sum[m][n][3]);
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

template <int kX, int kN, int kib, class Y, bool kPacked, bool kReadOnce = false>
void LaunchFew(const LinearArgs& args, Stream& stream) {
  using S = Shape<kX, kN, kib>;
  const int stages = static_cast<int>(std::min<int64_t>(S::kStages, TilesPerSegment(args.k)));
  const int ring_bytes = std::max(stages * S::kStageBytes, kX * 8 * kN * 8 * 4);  // or a segment's sums
  PreferSharedMemory(FewRowsKernel<kX, kN, kib, Y, kPacked, kReadOnce>);
  Launch(stream, FewRowsKernel<kX, kN, kib, Y, kPacked, kReadOnce>,
         dim3(Grid(DivideUp(args.n, kN * 8)), Grid(DivideUp(args.m, kX * 8))), kThreads,
         static_cast<size_t>(kSegments * ring_bytes), args, ring_bytes);
}

}  // namespace

// As measured. Few outputs go to narrow blocks, so that every multiprocessor has one; a short K leaves room for two
// calls' blocks at once, so that the next call's weights come while this one ends.
template <class Y>
void LinearFewRows(const LinearArgs& args, Stream& stream) {
  const bool short_k = args.k <= 1024;
  if (args.m <= 8) {
    if (args.n <= 2048) return LaunchFew<1, 1, 24, Y, true>(args, stream);
    if (args.n <= 4096 && !short_k) return LaunchFew<1, 2, 24, Y, true, true>(args, stream);
    if (args.n <= 8192 && !short_k) return LaunchFew<1, 2, 20, Y, true>(args, stream);
    return LaunchFew<1, 4, 24, Y, true>(args, stream);
  }
  if (args.m <= 16) {
    if (args.n <= 2048) return LaunchFew<2, 2, 32, Y, true>(args, stream);
    if (args.n <= 4096 && !short_k) return LaunchFew<2, 2, 24, Y, true>(args, stream);
    if (args.n <= 8192 && args.n > 4096 && short_k) return LaunchFew<2, 2, 12, Y, true>(args, stream);
    if (args.n <= 8192) return LaunchFew<2, 2, 16, Y, true>(args, stream);
    if (short_k) return LaunchFew<2, 4, 12, Y, true>(args, stream);
    return LaunchFew<2, 4, 24, Y, true>(args, stream);
  }
  if (args.n <= 4096) return LaunchFew<4, 2, 24, Y, true>(args, stream);
  LaunchFew<4, 4, 16, Y, true>(args, stream);
}
template <class Y>
void LinearUnaligned(const LinearArgs& args, Stream& stream) {
  LaunchFew<2, 4, 24, Y, false>(args, stream);
}

// --- Instantiations
// ------------------------------------------------------------------------------------------------------

template void LinearFewRows<bf16>(const LinearArgs&, Stream&);
template void LinearFewRows<float>(const LinearArgs&, Stream&);
template void LinearUnaligned<bf16>(const LinearArgs&, Stream&);
template void LinearUnaligned<float>(const LinearArgs&, Stream&);

}  // namespace millrace::cuda
