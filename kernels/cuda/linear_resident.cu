// y[m, n] = sum over c of x[m, c] * w[n, c] + bias[n] for few rows and weights that lie in the multiprocessors' shared
// memory whole, as those of a small model's layer do. x may be RmsNorm(residual + delta), y may be SiluMul of the
// sums. A block owns 8 kN outputs; each of its four warps (or of eight, which share the outputs) takes one segment of
// K. All weights are under way before the inputs are ready (cp.async, 128-byte lines), while the kernel before, or the
// one before that, still runs. Then x comes, mma.sync multiplies (x is the 16-row side, weights the 8-column side), and
// the block adds the four sums in order. Rows that are normalised are so by every block, in the order of rows.cu; the
// first block writes the sum. Bound: bytes, 2 per weight, and what a kernel that waits for the one before it costs.
// H200, 2026-11-30, Qwen3-0.6B at one row, a layer without attention (these four and RopeAppend): 14.7 us, of which the
// bytes need 7.5 at a copy's 4189 GB/s (51 %); 1024 -> 151936 71.5 us (104 %).
#include <algorithm>

#include "kernels/cuda/linear.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

enum class Output { kFloat, kBf16, kGated };

// kN tiles of 8 outputs; where they are gated, half are gates and half are what they gate.
template <int kN_, bool kNormed_, Output kOutput_>
struct Shape {
  static constexpr int kN = kN_;
  static constexpr bool kNormed = kNormed_;
  static constexpr Output kOutput = kOutput_;
  static constexpr bool kGated = kOutput == Output::kGated;
  static constexpr int kShares = kNormed ? 2 : 1;  // of the outputs, each some warps'
  static constexpr int kWarpN = kN / kShares;      // tiles of a warp
  static constexpr int kWarps = kSegments * kShares, kThreads = kWarps * kWarp;
  static constexpr int kMostThreads = kNormed ? 640 : kThreads;               // with those that only take registers
  static constexpr int kWidth = kN * 8, kOwn = kGated ? kWidth / 2 : kWidth;  // outputs: summed, stored
  static constexpr int kStageBytes = kWarpN * 8 * kTileBytes;                 // of a warp: a tile of its weights
  static_assert(kN % kShares == 0 && (!kGated || kShares == 2), "a warp has weights of one matrix");
};

__device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int Warp() { return static_cast<int>(threadIdx.x) / kWarp; }
template <int kThreads>
__device__ __forceinline__ void SyncComputing() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// x in shared memory: lines of 64 values, those of tile 0 first.
struct Rows {
  uint32_t at;
  int count;
  __device__ __forceinline__ uint32_t Tile(int tile) const {
    return at + static_cast<uint32_t>(tile * count * kTileBytes);
  }
};

// Two steps of 16 of both sides, as the tensor cores want them.
template <int kN>
struct Operands {
  uint32_t x[4], w[kN][4];

  // `half` of a tile. Rows that x lacks are copies of its last: their sums are nobody's.
  __device__ __forceinline__ void Load(uint32_t weights, const Rows& rows, int tile, int half) {
    LoadMatrices(x, Swizzled(rows.Tile(tile), min(Lane() % 8, rows.count - 1), half * 4 + Lane() / 8));
#pragma unroll
    for (int n = 0; n < kN; ++n) LoadMatrices(w[n], Swizzled(weights, n * 8 + Lane() % 8, half * 4 + Lane() / 8));
  }
  __device__ __forceinline__ void MultiplyInto(float (&sum)[kN][4]) const {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int n = 0; n < kN; ++n) Multiply(sum[n], x[2 * s], 0u, x[2 * s + 1], 0u, w[n][2 * s], w[n][2 * s + 1]);
    }
  }
};

// A warp's tiles [begin, begin + count) of x. Little of it comes through registers, so as not to wait for the weights.
__device__ __forceinline__ void BringRows(const Rows& rows, const LinearArgs& args, int begin, int count) {
  constexpr int kAtOnce = 4;
  const auto of_line = [&](int i, const auto& fn) {  // four lines at once, eight lanes each
    const int t = rows.count == 1 ? i : i / rows.count, row = i - t * rows.count;
    const int column = (begin + t) * kTileK + Lane() % 8 * 8;
    fn(Swizzled(rows.Tile(begin + t), row, Lane() % 8), args.x + row * args.k + column, column < args.k);
  };
  const int lines = count * rows.count;
  if (lines <= kAtOnce * 4) {
    uint4 packs[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (j * 4 + Lane() / 8 >= lines) continue;
      of_line(j * 4 + Lane() / 8, [&](uint32_t, const bf16* from, bool valid) {
        packs[j] = valid ? *reinterpret_cast<const uint4*>(from) : uint4{};
      });
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (j * 4 + Lane() / 8 >= lines) continue;
      of_line(j * 4 + Lane() / 8, [&](uint32_t to, const bf16*, bool) { StoreShared(to, packs[j]); });
    }
    return;
  }
  for (int i = Lane() / 8; i < lines; i += 4) {
    of_line(i, [&](uint32_t to, const bf16* from, bool valid) { CopyAsync16(to, valid ? from : args.x, valid); });
  }
  CommitCopies();
}

// Normalises x, all computing threads together. A unit is one pack of a row for each thread; kUnits are under way
// together, of one row or of several.
template <int kThreads>
struct Normaliser {
  static constexpr int kPack = 8, kUnits = 2, kWarps = kThreads / kWarp;
  static_assert(kMaxResidentK <= kThreads * kPack, "a thread has one pack of a row");

  int cols;
  float factors[kPack];

  __device__ __forceinline__ Normaliser(const float* weight, int64_t k) : cols(static_cast<int>(k)) {
    if (Column() < cols) LoadPack<kPack>(weight + Column(), factors);
  }
  static __device__ __forceinline__ int Column() { return static_cast<int>(threadIdx.x) * kPack; }

  // `partial` has room for kUnits * kWarps sums.
  __device__ __forceinline__ void Store(const Rows& rows, const NormedArgs& args, float* partial) const {
    const int warps = (cols + kPack * kWarp - 1) / (kPack * kWarp);
    const bool valid = Column() < cols;
#pragma unroll 1
    for (int base = 0; base < rows.count; base += kUnits) {
      float v[kUnits][kPack] = {};
      const auto for_units = [&](const auto& fn) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if (base + u < rows.count) fn(u, base + u, v[u]);
        }
      };
      for_units([&](int u, int row, float(&values)[kPack]) {
        if (valid) {
          LoadPack<kPack>(args.residual + row * cols + Column(), values);
          if (args.delta != nullptr) {
            float delta[kPack];
            LoadPack<kPack>(args.delta + row * cols + Column(), delta);
#pragma unroll
            for (int j = 0; j < kPack; ++j) values[j] += delta[j];
          }
        }
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kPack; ++j) sum = __fmaf_rn(values[j], values[j], sum);
        sum = WarpReduce(sum, [](float a, float b) { return a + b; });
        if (Lane() == 0) partial[u * kWarps + Warp()] = sum;
      });
      SyncComputing<kThreads>();
      for_units([&](int u, int row, float(&values)[kPack]) {
        float all = partial[u * kWarps];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) all = w < warps ? all + partial[u * kWarps + w] : all;
        const float scale = 1.0f / sqrtf(all / static_cast<float>(cols) + args.eps);
        if (valid && blockIdx.x == 0) StorePack<kPack>(args.sum + row * cols + Column(), values);
        if (Column() / kTileK >= static_cast<int>(TilesOf(cols))) return;
        float scaled[kPack];
#pragma unroll
        for (int j = 0; j < kPack; ++j) scaled[j] = valid ? values[j] * scale * factors[j] : 0;
        StoreShared(Swizzled(rows.Tile(Column() / kTileK), row, Column() / kPack % 8),
                    make_uint4(PackPair(scaled[0], scaled[1]), PackPair(scaled[2], scaled[3]),
                               PackPair(scaled[4], scaled[5]), PackPair(scaled[6], scaled[7])));
      });
      SyncComputing<kThreads>();
    }
  }
};

template <class S>
__global__ void __launch_bounds__(S::kMostThreads) ResidentKernel(LinearArgs args, NormedArgs normed) {
  if (threadIdx.x >= S::kThreads) return AwaitInputs();
  extern __shared__ __align__(1024) uint8_t shared[];
  const int tiles = static_cast<int>(TilesOf(args.k)), per_segment = static_cast<int>(TilesPerSegment(args.k));
  const int segment = Warp() % kSegments, share = Warp() / kSegments;
  const int begin = segment * per_segment, count = max(0, min(per_segment, tiles - begin));
  const int m = static_cast<int>(args.m);
  const int64_t outputs = S::kGated ? args.n / 2 : args.n, first_n = int64_t{blockIdx.x} * S::kOwn;
  uint8_t* const after_weights = shared + S::kWarps * per_segment * S::kStageBytes;
  const Rows rows{SharedAddress(after_weights), m};
  float* const sums = reinterpret_cast<float*>(after_weights + tiles * m * kTileBytes);  // [segment][row][output]
  const uint32_t weights = SharedAddress(shared) + static_cast<uint32_t>(Warp() * per_segment * S::kStageBytes);
  const auto stage = [&](int t) { return weights + static_cast<uint32_t>(t * S::kStageBytes); };

  const ChunkSource<S::kWarpN * 2, 4, true, true> source(args.w + (S::kGated ? share * outputs * args.k : 0),
                                                         first_n + (S::kGated ? 0 : share * S::kWarpN * 8) + Lane() / 8,
                                                         outputs, args.k, Lane() % 8);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
#pragma unroll
    for (int i = 0; i < S::kWarpN * 2; ++i) {
      source.Load(i, Swizzled(stage(t), i * 4 + Lane() / 8, Lane() % 8), begin + t);
    }
  }
  CommitCopies();
  if constexpr (S::kNormed) {
    const Normaliser<S::kThreads> normaliser(normed.weight, args.k);
    AwaitInputs();
    normaliser.Store(rows, normed, sums);
  } else {
    AwaitInputs();
    BringRows(rows, args, begin, count);
  }
  WaitCopies<0>();
  __syncwarp();

  float sum[S::kWarpN][4] = {};
  Operands<S::kWarpN> first, second;  // halves of a tile: each is loaded while the other is multiplied
  if (count > 0) first.Load(stage(0), rows, begin, 0);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    second.Load(stage(t), rows, begin + t, 1);
    first.MultiplyInto(sum);
    if (t + 1 < count) first.Load(stage(t + 1), rows, begin + t + 1, 0);
    second.MultiplyInto(sum);
  }

  if (Lane() / 4 < m) {
    float* const own = sums + (segment * m + Lane() / 4) * S::kWidth + share * S::kWarpN * 8 + Lane() % 4 * 2;
#pragma unroll
    for (int n = 0; n < S::kWarpN; ++n) *reinterpret_cast<float2*>(own + n * 8) = make_float2(sum[n][0], sum[n][1]);
  }
  SyncComputing<S::kThreads>();
  const int segments = (tiles + per_segment - 1) / per_segment;
  const auto total = [&](int row, int column) {
    float each[kSegments];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) each[s] = sums[(s * m + row) * S::kWidth + column];
#pragma unroll
    for (int s = 1; s < kSegments; ++s) each[0] = s < segments ? each[0] + each[s] : each[0];
    return each[0];
  };
  for (int i = static_cast<int>(threadIdx.x); i < m * S::kOwn; i += S::kThreads) {
    const int row = i / S::kOwn, column = i - row * S::kOwn;
    const int64_t n = first_n + column;
    if (n >= outputs) continue;
    float value = total(row, column);
    if constexpr (S::kGated) {
      value = SiluMul(ToFloat(Round(value)), ToFloat(Round(total(row, S::kOwn + column))));
    } else if (args.bias != nullptr) {
      value += args.bias[n];
    }
    using Y = std::conditional_t<S::kOutput == Output::kFloat, float, bf16>;
    StoreOutput(static_cast<Y*>(args.y) + row * outputs + n, value);
  }
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

// The next kernel's weights come early, and evenly over the multiprocessors, if one holds a block of each of two
// kernels but no two blocks of one. So those that normalise take more than half of the registers, with threads that do
// nothing else, and the others more than half of the shared memory; in a layer they alternate.
constexpr size_t kMoreThanHalf = 116 * 1024;

int ThreadsForMoreThanHalf(const void* kernel, int least, int most) {
  cudaFuncAttributes attributes{};
  CheckCuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  constexpr int kRegisters = 65536;
  const int each = (attributes.numRegs + 7) / 8 * 8;
  return std::clamp((kRegisters / 2 / each / kWarp + 1) * kWarp, least, most);
}

template <class S>
void LaunchResident(const LinearArgs& args, const NormedArgs& normed, Stream& stream) {
  const auto kernel = ResidentKernel<S>;
  static const int threads =
      ThreadsForMoreThanHalf(reinterpret_cast<const void*>(kernel), S::kThreads, S::kMostThreads);
  const auto bytes =
      static_cast<size_t>(S::kWarps * TilesPerSegment(args.k) * S::kStageBytes + TilesOf(args.k) * args.m * kTileBytes +
                          kSegments * args.m * S::kWidth * int64_t{sizeof(float)});
  const int64_t blocks = DivideUp(args.n, S::kWidth);
  const bool is_padded = !S::kNormed && blocks <= kResidentBlocks;  // more go round: as many at once as fit
  PreferSharedMemory(kernel);
  Launch(stream, kernel, Grid(blocks), threads, is_padded ? std::max(bytes, kMoreThanHalf) : bytes, args, normed);
}

template <Output kOutput>
void LaunchNormed(const LinearArgs& args, const NormedArgs& normed, Stream& stream) {
  if (args.n <= kResidentBlocks * 16) return LaunchResident<Shape<2, true, kOutput>>(args, normed, stream);
  if (args.n <= kResidentBlocks * 32) return LaunchResident<Shape<4, true, kOutput>>(args, normed, stream);
  LaunchResident<Shape<6, true, kOutput>>(args, normed, stream);
}

}  // namespace

void LinearResident(const LinearArgs& args, Stream& stream) {
  if (args.n <= kResidentBlocks * 8) return LaunchResident<Shape<1, false, Output::kFloat>>(args, {}, stream);
  if (args.n <= kResidentBlocks * 16) return LaunchResident<Shape<2, false, Output::kFloat>>(args, {}, stream);
  LaunchResident<Shape<4, false, Output::kFloat>>(args, {}, stream);
}
void NormLinearResident(const LinearArgs& args, const NormedArgs& normed, Stream& stream) {
  LaunchNormed<Output::kBf16>(args, normed, stream);
}
void NormGateUpResident(const LinearArgs& args, const NormedArgs& normed, Stream& stream) {
  LaunchNormed<Output::kGated>(args, normed, stream);
}

}  // namespace millrace::cuda
