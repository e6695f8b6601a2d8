// A step from the host's memory into the GPU's, and its tokens back. LoadStep: every thread of a small grid takes the
// elements i, i + threads, … of each array; reads go over PCIe, a few tens of KB a step. StoreTokens: one block. Bound:
// PCIe latency. Not measured.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kBlocks = 32;

template <class Fn>
__device__ __forceinline__ void ForAll(int64_t count, const Fn& fn) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) fn(i);
}

__global__ void __launch_bounds__(kThreads) LoadStepKernel(DeviceStep to, StagedSteps steps) {
  AwaitInputs();
  const StagedStep& from = steps.turns[to.turn[0] % kStepTurns];
  const StepCounts counts = *from.counts;
  Require(counts.rows <= to.tokens.size && counts.sequences <= to.context_len.size &&
          counts.logit_rows <= to.logit_rows.size && counts.biases <= to.biases.size);
  ForAll(to.tokens.size, [&](int64_t t) {
    const bool present = t < counts.rows;
    const int32_t token = present ? from.tokens[t] : 0;
    if (token < 0) Require(~token < to.last_tokens.size);
    // A slot whose logits were not finite has no token; its row is computed for nothing.
    to.tokens[t] = token >= 0 ? token : max(0, to.last_tokens[~token]);
    to.positions[t] = present ? from.positions[t] : 0;
    to.kv_slots[t] = present ? from.kv_slots[t] : -1;
  });
  ForAll(to.query_start.size,
         [&](int64_t s) { to.query_start[s] = from.query_start[min(s, int64_t{counts.sequences})]; });
  ForAll(to.logit_rows.size, [&](int64_t r) {
    const bool present = r < counts.logit_rows;
    to.logit_rows[r] = present ? from.logit_rows[r] : 0;
    to.slots[r] = present ? from.slots[r] : -1;
    to.targets[r] = present ? from.targets[r] : -1;
    to.sampling[r] = present ? from.sampling[r] : SamplingRow{};
  });
  ForAll(counts.biases, [&](int64_t b) { to.biases[b] = from.biases[b]; });
  // A warp per sequence.
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  for (int64_t s = warp; s < to.context_len.size; s += int64_t{gridDim.x} * kThreads / kWarp) {
    const int32_t context = s < counts.sequences ? from.context_len[s] : 0;
    if (lane == 0) to.context_len[s] = context;
    if (context == 0) continue;
    const int64_t blocks = DivideUp(context, kBlockTokens), first = from.first_block[s];
    Require(blocks <= to.block_table.cols && first + blocks <= from.blocks.size);
    for (int64_t b = lane; b < blocks; b += kWarp) to.block_table.row(s)[b] = from.blocks[first + b];
  }
}

__global__ void __launch_bounds__(kThreads) StoreTokensKernel(StagedSteps steps, DeviceStep step) {
  AwaitInputs();
  const StagedStep& to = steps.turns[step.turn[0] % kStepTurns];
  for (int64_t r = threadIdx.x; r < step.sampled.size; r += kThreads) {
    const int32_t token = step.targets[r] >= 0 ? step.targets[r] : step.sampled[r];
    step.chosen[r] = token;
    to.chosen[r] = token;
    const int32_t slot = step.slots[r];
    if (slot < 0) continue;
    Require(slot < step.last_tokens.size);
    step.last_tokens[slot] = token;
  }
  __syncthreads();
  if (threadIdx.x == 0) ++step.turn[0];
}

}  // namespace

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

void LoadStep(const DeviceStep& to, const StagedSteps& from, Stream& stream) {
  Launch(stream, LoadStepKernel, kBlocks, kThreads, 0, to, from);
}

void StoreTokens(const StagedSteps& to, const DeviceStep& step, Stream& stream) {
  Launch(stream, StoreTokensKernel, 1, kThreads, 0, to, step);
}

}  // namespace millrace::cuda
