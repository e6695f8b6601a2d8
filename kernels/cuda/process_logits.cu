// The row after penalties, bias, temperature, min-p, top-k and top-p; greedily, all but its first largest forbidden.
// One block per row, in place in the output. No part of a step: what users ask of it is to be right. Bound: bytes, 8
// per logit; the passes after the first read the second-level cache. Not measured.
#include "kernels/check.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sampling.cuh"
#include "kernels/cuda/vocabulary.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kRowThreads)
    ProcessLogitsKernel(float* out, const float* logits, int64_t vocab, const SamplingRow* rows,
                        const LogitBias* biases, const TokenCount* history) {
  AwaitInputs();
  __shared__ FilterScratch shared;
  const SamplingRow row = rows[blockIdx.x];
  const float* const x = logits + blockIdx.x * vocab;
  float* const z = out + blockIdx.x * vocab;
  const TokenCount* seen = row.history < 0 ? nullptr : history + row.history * vocab;
  ForRow(vocab, [&](int64_t v) { z[v] = seen == nullptr ? x[v] : Penalised(x[v], seen[v], row); });
  __syncthreads();
  for (int64_t b = row.bias_begin + static_cast<int>(threadIdx.x); b < row.bias_end; b += kRowThreads) {
    const LogitBias bias = biases[b];
    Require(bias.token >= 0 && bias.token < vocab);
    z[bias.token] += bias.value;
  }
  __syncthreads();
  const uint64_t best = LargestRank(z, vocab, shared.row);
  const float max = z[TokenOf(best)];
  __syncthreads();
  if (max == kForbidden) return;
  if (row.temperature == 0) {
    ForRow(vocab, [&](int64_t v) { z[v] = v == TokenOf(best) ? max : kForbidden; });
  } else {
    FilterRow(z, z, max, vocab, row, shared);
  }
}

}  // namespace

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

void ProcessLogits(Mat<float> out, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
                   Mat<const TokenCount> history, Stream& stream) {
  MILLRACE_CHECK(logits.cols <= kMaxVocab, "sums of a vocabulary's weights fit", logits.cols, kMaxVocab);
  if (logits.rows == 0) return;
  Launch(stream, ProcessLogitsKernel, Grid(logits.rows), kRowThreads, 0, out.data, logits.data, logits.cols, rows.data,
         biases.data, history.data);
}

}  // namespace millrace::cuda
