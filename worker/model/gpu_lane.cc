#include "worker/model/gpu_lane.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/ops.h"

namespace millrace {
namespace {

// Numbers of sequences that have a graph: dense where a step is short.
std::vector<int64_t> GraphSizes(int64_t most) {
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n < most; n += n < 4 ? 1 : n < 16 ? 4 : n < 256 ? 8 : 64) sizes.push_back(n);
  sizes.push_back(most);
  return sizes;
}

template <class T>
void CopyTo(Vec<T> to, const std::vector<T>& from) {
  MILLRACE_CHECK(static_cast<int64_t>(from.size()) <= to.size, "a step fits where it is staged",
                 static_cast<int64_t>(from.size()), to.size);
  std::ranges::copy(from, to.data);
}

}  // namespace

void GpuLane::PlaceOnDevice(Carver carver, Vec<int32_t> last_tokens, size_t* used) {
  const int64_t most_blocks = (limits_.context + kBlockTokens - 1) / kBlockTokens;
  const auto ids = [&](int64_t size) { return carver.TakeVec<int32_t>(size); };
  step_ = {.tokens = ids(limits_.rows),
           .positions = ids(limits_.rows),
           .kv_slots = ids(limits_.rows),
           .query_start = ids(limits_.sequences + 1),
           .context_len = ids(limits_.sequences),
           .block_table = carver.TakeMat<int32_t>(limits_.sequences, most_blocks),
           .logit_rows = ids(limits_.logit_rows),
           .slots = ids(limits_.logit_rows),
           .targets = ids(limits_.logit_rows),
           .sampling = carver.TakeVec<SamplingRow>(limits_.logit_rows),
           .biases = carver.TakeVec<LogitBias>(limits_.biases),
           .sampled = ids(limits_.logit_rows),
           .chosen = ids(limits_.logit_rows),
           .last_tokens = last_tokens,
           .turn = carver.TakeVec<uint32_t>(1)};
  *used = carver.used();
}

void GpuLane::PlaceShared(Carver carver, size_t* used) {
  const auto ids = [&](int64_t size) { return carver.TakeVec<int32_t>(size); };
  for (StagedStep& step : staged_.turns) {
    step = {.counts = carver.TakeVec<StepCounts>(1).data,
            .tokens = ids(limits_.rows),
            .positions = ids(limits_.rows),
            .kv_slots = ids(limits_.rows),
            .query_start = ids(limits_.sequences + 1),
            .context_len = ids(limits_.sequences),
            .first_block = ids(limits_.sequences),
            .blocks = ids(step_.block_table.rows * step_.block_table.cols),
            .logit_rows = ids(limits_.logit_rows),
            .slots = ids(limits_.logit_rows),
            .targets = ids(limits_.logit_rows),
            .sampling = carver.TakeVec<SamplingRow>(limits_.logit_rows),
            .biases = carver.TakeVec<LogitBias>(limits_.biases),
            .chosen = ids(limits_.logit_rows)};
  }
  *used = carver.used();
}

absl::Status GpuLane::TakeMemory(Vec<int32_t> last_tokens, Stream& stream) {
  size_t device_bytes = 0, shared_bytes = 0;
  PlaceOnDevice(Carver(nullptr), last_tokens, &device_bytes);
  PlaceShared(Carver(nullptr), &shared_bytes);
  device_memory_ = DeviceBuffer(device_bytes, stream);
  shared_memory_ = DeviceBuffer::Shared(shared_bytes, stream);
  if (device_memory_.data() == nullptr || shared_memory_.data() == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", device_bytes, " bytes of step state, and ",
                                                     shared_bytes, " bytes shared with the host"));
  }
  PlaceOnDevice(Carver(device_memory_.data()), last_tokens, &device_bytes);
  PlaceShared(Carver(shared_memory_.data()), &shared_bytes);
  return absl::OkStatus();
}

// Everything runs once before it is recorded: what the driver sets up on first use is no part of a step.
void GpuLane::RecordGraphs(const KvCache<bf16>* kv, Mat<TokenCount> history, bool counts_history, Stream& stream) {
  kv_ = kv;
  history_ = history;
  counts_history_ = counts_history;
  for (StagedStep& step : staged_.turns) *step.counts = {};
  for (const int64_t n : GraphSizes(std::min({limits_.sequences, limits_.logit_rows, limits_.rows}))) {
    Compute(n, n, n, stream);
    stream.Synchronize();
    graphs_.push_back({n, Graph(stream, [&] { Compute(n, n, n, stream); })});
  }
  stream.Synchronize();
  num_launched_ = graphs_.size();  // the device has counted as many turns
}

const GpuLane::DecodeGraph* GpuLane::GraphFor(const StepInput& input) const {
  const auto sequences = static_cast<int64_t>(input.context_len.size());
  if (input.num_rows() != sequences || static_cast<int64_t>(input.logit_rows.size()) != sequences) return nullptr;
  const auto graph = std::ranges::lower_bound(graphs_, sequences, {}, &DecodeGraph::sequences);
  return graph == graphs_.end() ? nullptr : &*graph;
}

void GpuLane::Stage(const StepInput& input, StagedStep& to) const {
  CopyTo(to.tokens, input.tokens);
  CopyTo(to.positions, input.positions);
  CopyTo(to.kv_slots, input.kv_slots);
  CopyTo(to.query_start, input.query_start);
  CopyTo(to.context_len, input.context_len);
  CopyTo(to.logit_rows, input.logit_rows);
  CopyTo(to.slots, input.slots);
  CopyTo(to.targets, input.target);
  CopyTo(to.sampling, input.sampling);
  CopyTo(to.biases, input.biases);
  int32_t first = 0;
  for (size_t s = 0; s < input.context_len.size(); ++s) {
    const int32_t used = (input.context_len[s] + kBlockTokens - 1) / kBlockTokens;
    to.first_block[static_cast<int64_t>(s)] = first;
    std::copy_n(input.block_table.data() + static_cast<int64_t>(s) * input.block_table_width, used,
                to.blocks.data + first);
    first += used;
  }
  *to.counts = {static_cast<int32_t>(input.num_rows()), static_cast<int32_t>(input.context_len.size()),
                static_cast<int32_t>(input.logit_rows.size()), static_cast<int32_t>(input.biases.size())};
}

void GpuLane::Compute(int64_t rows, int64_t sequences, int64_t logit_rows, Stream& stream) {
  DeviceStep step = step_;
  for (Vec<int32_t>* ids : {&step.tokens, &step.positions, &step.kv_slots}) ids->size = rows;
  for (Vec<int32_t>* ids : {&step.logit_rows, &step.slots, &step.targets, &step.sampled, &step.chosen}) {
    ids->size = logit_rows;
  }
  step.query_start.size = sequences + 1;
  step.context_len.size = step.block_table.rows = sequences;
  step.sampling.size = logit_rows;
  LoadStep(step, staged_, stream);
  const Mat<const float> logits = transformer_->ForwardFirst(num_layers_,
                                                             {step.tokens,
                                                              step.positions,
                                                              step.kv_slots,
                                                              {step.query_start, step.context_len, step.block_table},
                                                              step.logit_rows},
                                                             *kv_, stream);
  if (logit_rows > 0) {
    Sample(step.sampled, logits, step.sampling, step.biases, history_, stream);
    if (counts_history_) CountTokens(history_, step.sampling, step.sampled, stream);
  }
  StoreTokens(staged_, step, stream);
}

Vec<const int32_t> GpuLane::Launch(const StepInput& input, Stream& stream) {
  StagedStep& staged = staged_.turns[num_launched_++ % kStepTurns];
  Stage(input, staged);
  const auto logit_rows = static_cast<int64_t>(input.logit_rows.size());
  if (const DecodeGraph* graph = GraphFor(input); graph != nullptr) {
    graph->graph.Replay();
  } else {
    Compute(input.num_rows(), static_cast<int64_t>(input.context_len.size()), logit_rows, stream);
  }
  return {staged.chosen.data, logit_rows};
}

}  // namespace millrace
