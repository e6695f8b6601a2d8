// out[t] = table[ids[t]]; x += delta; out = x / sqrt(mean(x^2) + eps) * weight; out = silu(gate) * up. One block per
// row (norms of many rows: up to four warps); thread i takes the packs i, i + threads, …; a row's squares are summed
// per thread in that order, then across the block in a fixed tree, whose order fewer warps keep. Bound: bytes.
// Embedding 6 per element, GatherRows 4, Add 6, RmsNorm 6, AddRmsNorm 14, SiluMul 6. H200, 2026-11-30: SiluMul 99 % of
// a copy's 4230 GB/s at 16384 x 4096, 74 % (2.0 us) at 256 and 0.8 us for one row. The norms with a residual in bf16
// took 96 % (AddRmsNorm) and 80 % (RmsNorm), 2.7 and 2.3 us at 256, 1.5 and 1.3 us for one row. 2026-12-01, in float,
// in a prefill of 2048 x 4096: AddRmsNorm 32.6 us, 85 % of a copy's 4230 GB/s (34.7 with one pack to a thread); of 1024
// x 1024 6.7 us.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kMaxRowThreads = 512;
constexpr int kManyRowsThreads = 128;
constexpr int64_t kManyRows = 512;

template <int W, class Y>
__global__ void CopyRowsKernel(Y* out, const bf16* from, const int32_t* ids, int64_t ids_end, int64_t cols) {
  AwaitInputs();
  const int64_t id = ids[blockIdx.x];
  Require(id >= 0 && id < ids_end);
  for (int64_t c = int64_t{threadIdx.x} * W; c < cols; c += int64_t{blockDim.x} * W) {
    float v[W];
    LoadPack<W>(from + id * cols + c, v);
    StorePack<W>(out + int64_t{blockIdx.x} * cols + c, v);
  }
}

template <int W>
__global__ void AddKernel(bf16* x, const bf16* delta, int64_t count) {
  AwaitInputs();
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * W;
  if (i >= count) return;
  float a[W], b[W];
  LoadPack<W>(x + i, a);
  LoadPack<W>(delta + i, b);
#pragma unroll
  for (int j = 0; j < W; ++j) a[j] += b[j];
  StorePack<W>(x + i, a);
}

// The sum over the block, in a fixed tree. Called once.
__device__ __forceinline__ float BlockSum(float x) {
  __shared__ float sums[kMaxRowThreads / kWarp];
  x = WarpReduce(x, [](float a, float b) { return a + b; });
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  float all = sums[0];
  for (unsigned w = 1; w < blockDim.x / kWarp; ++w) all += sums[w];
  return all;
}

// With kSum the row is x + delta (null: zero), and goes to `total`, which may be x. A row that fits stays in the
// registers, N packs of each thread, and its weights are there before its values are; N = 0 reads twice.
template <int W, int N, bool kSum>
__global__ void __launch_bounds__(kMaxRowThreads)
    RmsNormKernel(bf16* out, float* total, const float* x, const float* delta, const float* weight, int64_t cols,
                  float eps) {
  constexpr int kHeld = N > 0 ? N : 1;
  float v[kHeld][W], factors[kHeld][W];
  const int64_t begin = int64_t{threadIdx.x} * W, step = int64_t{blockDim.x} * W;
  if constexpr (N > 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (begin + i * step < cols) LoadPack<W>(weight + begin + i * step, factors[i]);
    }
  }
  AwaitInputs();
  const int64_t row = int64_t{blockIdx.x} * cols;
  float sum = 0;
  const auto read = [&](int64_t c, float(&to)[W]) {
    LoadPack<W>(x + row + c, to);
    if constexpr (kSum) {
      if (delta != nullptr) {
        float d[W];
        LoadPack<W>(delta + row + c, d);
#pragma unroll
        for (int j = 0; j < W; ++j) to[j] += d[j];
      }
      StorePack<W>(total + row + c, to);
    }
#pragma unroll
    for (int j = 0; j < W; ++j) sum = __fmaf_rn(to[j], to[j], sum);
  };
  if constexpr (N > 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (begin + i * step < cols) read(begin + i * step, v[i]);
    }
  } else {
    for (int64_t c = begin; c < cols; c += step) read(c, v[0]);
  }
  const float scale = 1.0f / sqrtf(BlockSum(sum) / static_cast<float>(cols) + eps);
  const auto write = [&](int64_t c, float(&values)[W], const float(&by)[W]) {
#pragma unroll
    for (int j = 0; j < W; ++j) values[j] = values[j] * scale * by[j];
    StorePack<W>(out + row + c, values);
  };
  if constexpr (N > 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (begin + i * step < cols) write(begin + i * step, v[i], factors[i]);
    }
  } else {
    for (int64_t c = begin; c < cols; c += step) {
      LoadPack<W>((kSum ? total : x) + row + c, v[0]);
      LoadPack<W>(weight + c, factors[0]);
      write(c, v[0], factors[0]);
    }
  }
}

// RmsNormKernel<8, 1, true> for many rows, in its bits: a warp takes what kTurns warps take there, so that a thread has
// more under way and a row of one warp waits for no other. `warps` for a row.
template <int kTurns>
__global__ void __launch_bounds__(kManyRowsThreads)
    ManyRmsNormsKernel(bf16* out, float* total, const float* x, const float* delta, const float* weight, int64_t rows,
                       int cols, int warps, float eps) {
  constexpr int kPack = 8;
  __shared__ float shared[kMaxRowThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp % warps;
  const int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp / warps;
  const auto column = [&](int turn) { return ((warp * kTurns + turn) * kWarp + lane) * kPack; };
  float v[kTurns][kPack], factors[kTurns][kPack], sums[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (column(i) < cols) LoadPack<kPack>(weight + column(i), factors[i]);
  }
  AwaitInputs();
  if (row >= rows) return;
  const int64_t begin = row * cols;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (column(i) < cols) LoadPack<kPack>(x + begin + column(i), v[i]);
  }
  if (delta != nullptr) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      float d[kPack];
      if (column(i) < cols) LoadPack<kPack>(delta + begin + column(i), d);
#pragma unroll
      for (int j = 0; j < kPack; ++j) v[i][j] += d[j];
    }
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    float sum = 0;
    if (column(i) < cols) {
      StorePack<kPack>(total + begin + column(i), v[i]);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum = __fmaf_rn(v[i][j], v[i][j], sum);
    }
    sums[i] = WarpReduce(sum, [](float a, float b) { return a + b; });
  }
  if (warps > 1) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (lane == 0) shared[warp * kTurns + i] = sums[i];
    }
    __syncthreads();
  }
  const int parts = (cols + kWarp * kPack - 1) / (kWarp * kPack);
  float all = warps > 1 ? shared[0] : sums[0];
  if (warps > 1) {
    for (int i = 1; i < parts; ++i) all += shared[i];
  } else {
#pragma unroll
    for (int i = 1; i < kTurns; ++i) all = i < parts ? all + sums[i] : all;
  }
  const float scale = 1.0f / sqrtf(all / static_cast<float>(cols) + eps);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (column(i) >= cols) continue;
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[i][j] = v[i][j] * scale * factors[i][j];
    StorePack<kPack>(out + begin + column(i), v[i]);
  }
}

template <int W>
__global__ void SiluMulKernel(bf16* out, const bf16* gate_up, int64_t cols) {
  AwaitInputs();
  const int64_t c = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * W;
  if (c >= cols) return;
  const int64_t row = blockIdx.x;
  float gate[W], up[W];
  LoadPack<W>(gate_up + row * 2 * cols + c, gate);
  LoadPack<W>(gate_up + row * 2 * cols + cols + c, up);
#pragma unroll
  for (int j = 0; j < W; ++j) gate[j] = SiluMul(gate[j], up[j]);
  StorePack<W>(out + row * cols + c, gate);
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

// Threads for a row of n packs: a function of the row's length alone, as the order of its sum is.
int ThreadsFor(int64_t n, int most) {
  return static_cast<int>(n >= most ? most : n <= kWarp ? kWarp : DivideUp(n, kWarp) * kWarp);
}

template <class Y>
void CopyRows(Mat<Y> out, const bf16* from, Vec<const int32_t> ids, int64_t ids_end, Stream& stream) {
  if (out.rows == 0) return;
  if (InPacks(out.data, out.cols) && InPacks(from, out.cols)) {
    Launch(stream, CopyRowsKernel<8, Y>, Grid(out.rows), ThreadsFor(out.cols / 8, 256), 0, out.data, from, ids.data,
           ids_end, out.cols);
  } else {
    Launch(stream, CopyRowsKernel<1, Y>, Grid(out.rows), ThreadsFor(out.cols, 256), 0, out.data, from, ids.data,
           ids_end, out.cols);
  }
}

template <bool kSum>
void LaunchNorm(Mat<bf16> out, float* total, const float* x, const float* delta, Vec<const float> weight, float eps,
                Stream& stream) {
  if (out.rows == 0) return;
  const bool in_packs = InPacks(out.data, out.cols) && InPacks(x, out.cols) && InPacks(weight.data, out.cols) &&
                        InPacks(total, out.cols) && InPacks(delta, out.cols);
  const int64_t packs = in_packs ? out.cols / 8 : out.cols;
  if (kSum && in_packs && packs <= kMaxRowThreads && out.rows >= kManyRows) {
    constexpr int kTurns = 4;
    const int warps = static_cast<int>(DivideUp(packs, kTurns * kWarp));
    const int threads = warps == 1 ? kManyRowsThreads : warps * kWarp;  // which several rows share, or one has
    return Launch(stream, ManyRmsNormsKernel<kTurns>, Grid(DivideUp(out.rows * warps * kWarp, threads)), threads, 0,
                  out.data, total, x, delta, weight.data, out.rows, static_cast<int>(out.cols), warps, eps);
  }
  const auto kernel = !in_packs                     ? RmsNormKernel<1, 0, kSum>
                      : packs <= kMaxRowThreads     ? RmsNormKernel<8, 1, kSum>
                      : packs <= 2 * kMaxRowThreads ? RmsNormKernel<8, 2, kSum>
                                                    : RmsNormKernel<8, 0, kSum>;
  Launch(stream, kernel, Grid(out.rows), ThreadsFor(packs, kMaxRowThreads), 0, out.data, total, x, delta, weight.data,
         out.cols, eps);
}

}  // namespace

// --- Instantiations
// ------------------------------------------------------------------------------------------------------

void Embedding(Mat<float> out, PackedWeight table, Vec<const int32_t> tokens, Stream& stream) {
  CopyRows(out, table.data, tokens, table.out, stream);
}

void GatherRows(Mat<bf16> out, Mat<const bf16> x, Vec<const int32_t> rows, Stream& stream) {
  CopyRows(out, x.data, rows, x.rows, stream);
}

void RmsNorm(Mat<bf16> out, Mat<const float> x, Vec<const float> weight, float eps, Stream& stream) {
  LaunchNorm<false>(out, nullptr, x.data, nullptr, weight, eps, stream);
}

void AddRmsNorm(Mat<bf16> out, Mat<float> residual, Mat<const float> delta, Vec<const float> weight, float eps,
                Stream& stream) {
  LaunchNorm<true>(out, residual.data, residual.data, delta.data, weight, eps, stream);
}

void Normalise(const NormedInput<bf16>& x, Stream& stream) {
  LaunchNorm<true>(x.rows, x.sum.data, x.residual.data, x.delta.rows == 0 ? nullptr : x.delta.data, x.weight, x.eps,
                   stream);
}

void Add(Mat<bf16> x, Mat<const bf16> delta, Stream& stream) {
  const int64_t count = x.rows * x.cols;
  if (count == 0) return;
  constexpr int kThreads = 256;
  if (InPacks(x.data, count) && InPacks(delta.data, count)) {
    Launch(stream, AddKernel<8>, Grid(DivideUp(count, kThreads * 8)), kThreads, 0, x.data, delta.data, count);
  } else {
    Launch(stream, AddKernel<1>, Grid(DivideUp(count, kThreads)), kThreads, 0, x.data, delta.data, count);
  }
}

void SiluMul(Mat<bf16> out, Mat<const bf16> gate_up, Stream& stream) {
  if (out.rows == 0) return;
  constexpr int kThreads = 128;
  if (InPacks(out.data, out.cols) && InPacks(gate_up.data, out.cols)) {
    Launch(stream, SiluMulKernel<8>, dim3(Grid(out.rows), Grid(DivideUp(out.cols, kThreads * 8))), kThreads, 0,
           out.data, gate_up.data, out.cols);
  } else {
    Launch(stream, SiluMulKernel<1>, dim3(Grid(out.rows), Grid(DivideUp(out.cols, kThreads))), kThreads, 0, out.data,
           gate_up.data, out.cols);
  }
}

}  // namespace millrace::cuda
