// chosen[r] = logits[r, token] - ln(sum over v of e^logits[r, v]), and the N likeliest tokens. One block per row: its
// largest value, its sum in double (per thread in order, then a fixed tree), then N passes that each find the next
// rank. Bound: bytes, 4 per logit; the N passes read the second-level cache. Not measured.
#include "kernels/cuda/ops.h"
#include "kernels/cuda/vocabulary.cuh"
#include "kernels/gumbel.h"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kRowThreads)
    LogProbsKernel(float* chosen, float* top_values, int32_t* top_tokens, int64_t top, const float* logits,
                   int64_t vocab, const int32_t* tokens) {
  AwaitInputs();
  __shared__ RowScratch scratch;
  const int64_t r = blockIdx.x;
  const float* x = logits + r * vocab;
  uint64_t rank = LargestRank(x, vocab, scratch);
  const float max = ValueOf(static_cast<uint32_t>(rank >> 32));
  double sum = 0;
  ForRow(vocab, [&](int64_t v) { sum += Exp(x[v] - max); });
  sum = BlockReduce(sum, scratch.doubles, [](double a, double b) { return a + b; });
  const double log_sum = max + NaturalLog(sum);
  if (threadIdx.x == 0) {
    const int64_t token = tokens[r];
    Require(token < vocab);
    chosen[r] = token < 0 ? -INFINITY : static_cast<float>(x[token] - log_sum);
  }
  for (int64_t i = 0; i < top; ++i) {
    if (threadIdx.x == 0) {
      top_tokens[r * top + i] = static_cast<int32_t>(TokenOf(rank));
      top_values[r * top + i] = static_cast<float>(x[TokenOf(rank)] - log_sum);
    }
    if (i + 1 == top) break;
    uint64_t next = 0;
    ForRow(vocab, [&](int64_t v) {
      const uint64_t candidate = RankOf(x[v], v);
      if (candidate < rank && candidate > next) next = candidate;
    });
    rank = BlockMax(next, scratch);
  }
}

}  // namespace

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

void LogProbs(Vec<float> chosen, Mat<float> top_values, Mat<int32_t> top_tokens, Mat<const float> logits,
              Vec<const int32_t> tokens, Stream& stream) {
  if (logits.rows == 0) return;
  Launch(stream, LogProbsKernel, Grid(logits.rows), kRowThreads, 0, chosen.data, top_values.data, top_tokens.data,
         top_values.cols, logits.data, logits.cols, tokens.data);
}

}  // namespace millrace::cuda
