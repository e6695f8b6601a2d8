// chosen[r] = logits[r, token] - ln(sum over v of e^logits[r, v]), and the N likeliest tokens. Sum reads the logits
// once, a block of 256 threads per tile of 4096 tokens; a warp leaves the sum of its 512, in double and about a power
// of two of its own, and each thread its slot's maximum. Rank, a block per row, adds the sums in their order and sorts
// the few tokens that the maxima leave as the largest; where they leave too many, N passes each find the next. Bound:
// bytes, 4 per logit. H200, 2026-11-30, V = 151936, share of a copy's 4219 GB/s: 256 rows 73 % without top tokens
// (50 us), 52 % with 5 (71 us); one row 5 us and 14 us.
#include "kernels/check.h"
#include "kernels/cuda/leaders.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/vocabulary.cuh"
#include "kernels/gumbel.h"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kTileWarps = kTileThreads / kWarp;
constexpr int64_t kBatchRows = 256;

// Of one warp's 512 tokens of a tile: the largest, and the sum of e^(x - largest).
struct WarpSum {
  double sum;
  float largest;
};

template <bool kInPacks>
__global__ void __launch_bounds__(kTileThreads)
    SumKernel(WarpSum* sums, float* maxima, const float* logits, int64_t vocab, int64_t tiles) {
  AwaitInputs();
  const int64_t r = blockIdx.y, tile = blockIdx.x;
  const int64_t v = tile * kTile + threadIdx.x * 4;
  float x[kGroups][4], finite = 0;
  LoadSlot(x, logits + r * vocab, static_cast<int>(v), static_cast<int>(vocab), kInPacks && (tile + 1) * kTile <= vocab,
           finite);
  float largest = x[0][0];
#pragma unroll
  for (int i = 1; i < kGroups * 4; ++i) largest = fmaxf(largest, x[i / 4][i % 4]);
  maxima[(r * tiles + tile) * kTileThreads + threadIdx.x] = largest;
  largest = WarpReduce(largest, [](float a, float b) { return fmaxf(a, b); });
  const float shift = largest == -INFINITY ? 0.0f : largest;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kGroups * 4; ++i) sum += Exp(x[i / 4][i % 4] - shift);
  const double all = WarpReduce(static_cast<double>(sum), [](double a, double b) { return a + b; });
  if (threadIdx.x % kWarp == 0) sums[(r * tiles + tile) * kTileWarps + threadIdx.x / kWarp] = {all, largest};
}

template <bool kInPacks>
__global__ void __launch_bounds__(kRowThreads)
    RankKernel(float* chosen, float* top_values, int32_t* top_tokens, int64_t top, const WarpSum* sums,
               const float* maxima, const float* logits, int64_t vocab, int64_t tiles, const int32_t* tokens) {
  AwaitInputs();
  __shared__ LeaderScratch shared;
  const int64_t r = blockIdx.x;
  const float* const x = logits + r * vocab;
  sums += r * tiles * kTileWarps;
  uint64_t key = 0;
  for (int64_t i = threadIdx.x; i < tiles * kTileWarps; i += kRowThreads) {
    key = ::max(key, uint64_t{KeyOf(sums[i].largest)});
  }
  const float max = ValueOf(static_cast<uint32_t>(BlockMax(key, shared.row)));
  double sum = 0;
  for (int64_t i = threadIdx.x; i < tiles * kTileWarps; i += kRowThreads) {
    sum += sums[i].sum * static_cast<double>(Exp(sums[i].largest - max));
  }
  __syncthreads();
  sum = RowReduce(sum, shared.row.doubles, [](double a, double b) { return a + b; });
  const double log_sum = max + NaturalLog(sum);
  if (threadIdx.x == 0) {
    const int64_t token = tokens[r];
    Require(token < vocab);
    chosen[r] = token < 0 ? -INFINITY : static_cast<float>(x[token] - log_sum);
  }
  if (top == 0) return;
  const TiledRow tiled{x, maxima + r * tiles * kTileThreads, vocab, kInPacks, max, 1.0f, {0, 1}};
  const int last = BinOfLargest(tiled, top, shared);
  const auto write = [&](int64_t i, uint64_t rank) {
    top_tokens[r * top + i] = static_cast<int32_t>(TokenOf(rank));
    top_values[r * top + i] = static_cast<float>(x[TokenOf(rank)] - log_sum);
  };
  if (last < kBins &&
      GatherLeaders(tiled, 0, last, shared, [](float value, float, int64_t v) { return RankOf(value, v); })) {
    SortLeaders(shared);
    for (int64_t i = threadIdx.x; i < top; i += kRowThreads) write(i, shared.ranks[i]);
    return;
  }
  uint64_t rank = ~uint64_t{0};
  for (int64_t i = 0; i < top; ++i) {
    uint64_t next = 0;
    ForRow(vocab, [&](int64_t v) {
      const uint64_t candidate = RankOf(x[v], v);
      if (candidate < rank && candidate > next) next = candidate;
    });
    rank = BlockMax(next, shared.row);
    if (threadIdx.x == 0) write(i, rank);
  }
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

size_t WorkspaceBytes(int64_t tiles) {
  return static_cast<size_t>(kBatchRows * tiles) * (kTileWarps * sizeof(WarpSum) + kTileThreads * sizeof(float));
}

template <bool kInPacks>
void LogProbsBatch(Vec<float> chosen, Mat<float> top_values, Mat<int32_t> top_tokens, Mat<const float> logits,
                   Vec<const int32_t> tokens, Stream& stream) {
  const int64_t tiles = DivideUp(logits.cols, kTile);
  MILLRACE_CHECK(stream.workspace_bytes() >= WorkspaceBytes(tiles), "sampling's workspace suffices", tiles);
  WarpSum* const sums = reinterpret_cast<WarpSum*>(stream.workspace());
  float* const maxima = reinterpret_cast<float*>(sums + kBatchRows * tiles * kTileWarps);
  Launch(stream, SumKernel<kInPacks>, dim3(Grid(tiles), Grid(logits.rows)), kTileThreads, 0, sums, maxima, logits.data,
         logits.cols, tiles);
  Launch(stream, RankKernel<kInPacks>, Grid(logits.rows), kRowThreads, 0, chosen.data, top_values.data, top_tokens.data,
         top_values.cols, sums, maxima, logits.data, logits.cols, tiles, tokens.data);
}

}  // namespace

void LogProbs(Vec<float> chosen, Mat<float> top_values, Mat<int32_t> top_tokens, Mat<const float> logits,
              Vec<const int32_t> tokens, Stream& stream) {
  const auto batch = InPacks(logits.data, logits.cols) ? LogProbsBatch<true> : LogProbsBatch<false>;
  for (int64_t r = 0; r < logits.rows; r += kBatchRows) {
    const int64_t count = std::min(kBatchRows, logits.rows - r);
    batch(chosen.Slice(r, count), top_values.Rows(r, count), top_tokens.Rows(r, count), logits.Rows(r, count),
          tokens.Slice(r, count), stream);
  }
}

}  // namespace millrace::cuda
