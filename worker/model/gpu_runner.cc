#include "worker/model/gpu_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/ops.h"

namespace millrace {
namespace {

constexpr int32_t kMaxTopTokens = 20;  // of a row's log-probabilities
// Left beside everything else where the pool takes what remains: graphs, and what the driver takes as it goes.
constexpr int64_t kSpareBytes = int64_t{1} << 30;

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

absl::StatusOr<int64_t> PoolBytes(const ModelRunnerOptions& options, int64_t free_before, const Stream& stream) {
  if (options.kv_bytes != 0) return options.kv_bytes;
  const auto budget = static_cast<int64_t>(static_cast<double>(free_before) * options.device_fraction);
  const int64_t taken = free_before - stream.FreeBytes();
  if (budget - taken - kSpareBytes > 0) return budget - taken - kSpareBytes;
  return absl::ResourceExhaustedError(absl::StrCat(
      "no memory for a KV pool: weights and activations take ", taken, " bytes, graphs up to ", kSpareBytes,
      "; the limit for all together is ", budget, ", ", options.device_fraction, " of what was free"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelRunner>> GpuRunner::Load(const ModelRunnerOptions& options, ModelConfig config,
                                                             const Checkpoint& checkpoint, Stream stream) {
  if (!options.draft_model_dir.empty() || options.draft_layers > 0) {
    return absl::UnimplementedError(
        "a GPU drafts tokens by looking them up alone: the limit is no draft model and no draft layers");
  }
  const int64_t free_before = stream.FreeBytes();
  auto transformer = Transformer<bf16>::Load(config, checkpoint,
                                             {options.max_rows, options.max_logit_rows, config.max_position}, stream);
  if (!transformer.ok()) return transformer.status();
  stream.ReserveWorkspace(SampleWorkspaceBytes(config.vocab_size, stream));
  // Its size is known once everything else has its memory.
  std::unique_ptr<GpuRunner> runner(
      new GpuRunner(options, std::move(config), std::move(stream), *std::move(transformer)));
  if (absl::Status status = runner->TakeMemory(); !status.ok()) return status;
  const auto kv_bytes = PoolBytes(options, free_before, runner->stream_);
  if (!kv_bytes.ok()) return kv_bytes.status();
  auto kv = KvCache<bf16>::Allocate(runner->config(), *kv_bytes, runner->stream_);
  if (!kv.ok()) return kv.status();
  runner->kv_ = *std::move(kv);
  runner->max_context_ = std::min(runner->config().max_position, runner->kv_.num_blocks() * kBlockTokens);
  runner->RecordGraphs();
  return runner;
}

GpuRunner::GpuRunner(const ModelRunnerOptions& options, ModelConfig config, Stream stream,
                     Transformer<bf16> transformer)
    : ModelRunner(options, std::move(config)), stream_(std::move(stream)), transformer_(std::move(transformer)) {}

GpuRunner::~GpuRunner() { stream_.Synchronize(); }

void GpuRunner::PlaceOnDevice(Carver carver, size_t* used) {
  const int64_t rows = options().max_rows, sequences = options().max_slots, logit_rows = options().max_logit_rows;
  const int64_t most_blocks = (config().max_position + kBlockTokens - 1) / kBlockTokens;
  const auto ids = [&](int64_t size) { return carver.TakeVec<int32_t>(size); };
  step_ = {.tokens = ids(rows),
           .positions = ids(rows),
           .kv_slots = ids(rows),
           .query_start = ids(sequences + 1),
           .context_len = ids(sequences),
           .block_table = carver.TakeMat<int32_t>(sequences, most_blocks),
           .logit_rows = ids(logit_rows),
           .slots = ids(logit_rows),
           .targets = ids(logit_rows),
           .sampling = carver.TakeVec<SamplingRow>(logit_rows),
           .biases = carver.TakeVec<LogitBias>(options().max_biases),
           .sampled = ids(logit_rows),
           .chosen = ids(logit_rows),
           .last_tokens = ids(options().max_slots),
           .turn = carver.TakeVec<uint32_t>(1)};
  history_ = carver.TakeMat<TokenCount>(options().max_slots, config().vocab_size);
  *used = carver.used();
}

void GpuRunner::PlaceShared(Carver carver, size_t* used) {
  const int64_t rows = options().max_rows, sequences = options().max_slots, logit_rows = options().max_logit_rows;
  const auto ids = [&](int64_t size) { return carver.TakeVec<int32_t>(size); };
  for (int turn = 0; turn < kStepTurns; ++turn) {
    staged_.turns[turn] = {.counts = carver.TakeVec<StepCounts>(1).data,
                           .tokens = ids(rows),
                           .positions = ids(rows),
                           .kv_slots = ids(rows),
                           .query_start = ids(sequences + 1),
                           .context_len = ids(sequences),
                           .first_block = ids(sequences),
                           .blocks = ids(step_.block_table.rows * step_.block_table.cols),
                           .logit_rows = ids(logit_rows),
                           .slots = ids(logit_rows),
                           .targets = ids(logit_rows),
                           .sampling = carver.TakeVec<SamplingRow>(logit_rows),
                           .biases = carver.TakeVec<LogitBias>(options().max_biases),
                           .chosen = ids(logit_rows)};
    logprobs_[turn] = {.chosen = carver.TakeVec<float>(logit_rows),
                       .top_values = carver.TakeVec<float>(logit_rows * kMaxTopTokens),
                       .top_tokens = ids(logit_rows * kMaxTopTokens)};
  }
  *used = carver.used();
}

absl::Status GpuRunner::TakeMemory() {
  size_t device_bytes = 0, shared_bytes = 0;
  PlaceOnDevice(Carver(nullptr), &device_bytes);
  PlaceShared(Carver(nullptr), &shared_bytes);
  device_memory_ = DeviceBuffer(device_bytes, stream_);
  shared_memory_ = DeviceBuffer::Shared(shared_bytes, stream_);
  if (device_memory_.data() == nullptr || shared_memory_.data() == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", device_bytes, " bytes of step state and token histories of ",
                     options().max_slots, " slots, and ", shared_bytes, " bytes shared with the host"));
  }
  PlaceOnDevice(Carver(device_memory_.data()), &device_bytes);
  PlaceShared(Carver(shared_memory_.data()), &shared_bytes);
  return absl::OkStatus();
}

// Everything runs once before it is recorded: what the driver sets up on first use is no part of a step.
void GpuRunner::RecordGraphs() {
  const int64_t most = std::min(options().max_slots, options().max_logit_rows);
  staged_.turns[0].counts[0] = staged_.turns[1].counts[0] = {};
  for (const int64_t n : GraphSizes(std::min<int64_t>(most, options().max_rows))) {
    Compute(n, n, n);
    stream_.Synchronize();
    graphs_.push_back({n, Graph(stream_, [&] { Compute(n, n, n); })});
  }
  stream_.Synchronize();
  launched_ = awaited_ = graphs_.size();  // the device has counted as many turns
}

const GpuRunner::DecodeGraph* GpuRunner::GraphFor(const StepInput& input) const {
  const auto sequences = static_cast<int64_t>(input.context_len.size());
  if (input.num_rows() != sequences || static_cast<int64_t>(input.logit_rows.size()) != sequences) return nullptr;
  const auto graph = std::ranges::lower_bound(graphs_, sequences, {}, &DecodeGraph::sequences);
  return graph == graphs_.end() ? nullptr : &*graph;
}

void GpuRunner::Stage(const StepInput& input, StagedStep& to) const {
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

Mat<const float> GpuRunner::Compute(int64_t rows, int64_t sequences, int64_t logit_rows) {
  DeviceStep step = step_;
  for (Vec<int32_t>* ids : {&step.tokens, &step.positions, &step.kv_slots}) ids->size = rows;
  for (Vec<int32_t>* ids : {&step.logit_rows, &step.slots, &step.targets, &step.sampled, &step.chosen}) {
    ids->size = logit_rows;
  }
  step.query_start.size = sequences + 1;
  step.context_len.size = step.block_table.rows = sequences;
  step.sampling.size = logit_rows;
  LoadStep(step, staged_, stream_);
  const Mat<const float> logits = transformer_.Forward({step.tokens,
                                                        step.positions,
                                                        step.kv_slots,
                                                        {step.query_start, step.context_len, step.block_table},
                                                        step.logit_rows},
                                                       kv_, stream_);
  if (logit_rows > 0) {
    Sample(step.sampled, logits, step.sampling, step.biases, history_, stream_);
    CountTokens(history_, step.sampling, step.sampled, stream_);
  }
  StoreTokens(staged_, step, stream_);
  return logits;
}

void GpuRunner::Launch(const StepInput& input) {
  Check(input, max_context_);
  MILLRACE_CHECK(launched_ - awaited_ < kStepTurns, "the results of earlier steps were taken");
  const auto turn = static_cast<int>(launched_++ % kStepTurns);
  Stage(input, staged_.turns[turn]);
  const auto logit_rows = static_cast<int64_t>(input.logit_rows.size());
  if (const DecodeGraph* graph = GraphFor(input); graph != nullptr) {
    graph->graph.Replay();
  } else {
    Compute(input.num_rows(), static_cast<int64_t>(input.context_len.size()), logit_rows);
  }
  Flight& flight = flights_[turn];
  flight.num_logprobs = input.num_logprobs;
  flight.guesses.assign(input.logit_rows.size(), -1);
  for (size_t r = 0; r < input.logit_rows.size(); ++r) {
    if (input.is_guess[r]) flight.guesses[r] = input.tokens[static_cast<size_t>(input.logit_rows[r])];
  }
  flight.most_logprobs = logit_rows == 0 ? -1 : std::ranges::max(input.num_logprobs);
  if (flight.most_logprobs >= 0) {
    MILLRACE_CHECK(flight.most_logprobs <= kMaxTopTokens, "no more top tokens than there is room for",
                   flight.most_logprobs);
    const StagedLogProbs& to = logprobs_[turn];
    LogProbs({to.chosen.data, logit_rows}, {to.top_values.data, logit_rows, flight.most_logprobs},
             {to.top_tokens.data, logit_rows, flight.most_logprobs}, transformer_.logits(logit_rows),
             {step_.chosen.data, logit_rows}, stream_);
  }
  stream_.Mark(turn);
}

void GpuRunner::Await(StepOutput& output) {
  MILLRACE_CHECK(awaited_ < launched_, "a step is under way");
  const auto turn = static_cast<int>(awaited_++ % kStepTurns);
  stream_.AwaitMark(turn);
  const Flight& flight = flights_[turn];
  const size_t count = flight.num_logprobs.size();
  output.tokens.assign(staged_.turns[turn].chosen.data, staged_.turns[turn].chosen.data + count);
  output.logprobs.assign(count, {});
  for (size_t r = 0; r < count; ++r) {
    if (flight.guesses[r] >= 0 && flight.guesses[r] != output.tokens[r - 1]) output.tokens[r] = kNotReached;
    if (flight.num_logprobs[r] < 0 || output.tokens[r] < 0) continue;
    const auto begin = static_cast<int64_t>(r) * flight.most_logprobs;
    TokenLogProbs& row = output.logprobs[r];
    row.chosen = logprobs_[turn].chosen[static_cast<int64_t>(r)];
    const float* const values = logprobs_[turn].top_values.data + begin;
    const int32_t* const tokens = logprobs_[turn].top_tokens.data + begin;
    row.top_values.assign(values, values + flight.num_logprobs[r]);
    row.top_tokens.assign(tokens, tokens + flight.num_logprobs[r]);
  }
}

// Waits for the steps under way: rare enough, and the history then is the sequence's own.
void GpuRunner::ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) {
  const std::vector<TokenCount> counts = CountHistory(slot, prompt, output);
  stream_.Copy(history_.row(slot), counts.data(), counts.size() * sizeof(TokenCount));
}

}  // namespace millrace
