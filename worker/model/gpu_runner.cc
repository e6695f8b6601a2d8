#include "worker/model/gpu_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/ops.h"
#include "worker/model/draft_pass.h"

namespace millrace {
namespace {

static_assert(kMaxDrafts <= kStepTurns, "what the passes of a step guess can be read when it has ended");

constexpr int32_t kMaxTopTokens = 20;  // of a row's log-probabilities
// Left beside everything else where the pool takes what remains: graphs, and what the driver takes as it goes.
constexpr int64_t kSpareBytes = int64_t{1} << 30;

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
  const int64_t free_before = stream.FreeBytes();
  const StepLimits limits = {options.max_rows, options.max_logit_rows, config.max_position};
  auto transformer = Transformer<bf16>::Load(config, checkpoint, limits, stream);
  if (!transformer.ok()) return transformer.status();
  stream.ReserveWorkspace(SampleWorkspaceBytes(config.vocab_size, stream));
  std::unique_ptr<GpuRunner> runner(
      new GpuRunner(options, std::move(config), std::move(stream), *std::move(transformer)));
  if (absl::Status status = runner->LoadDraft(limits); !status.ok()) return status;
  if (absl::Status status = runner->TakeMemory(); !status.ok()) return status;
  // Its size is known once everything else has its memory.
  if (absl::Status status = runner->TakePool(free_before); !status.ok()) return status;
  runner->RecordGraphs();
  return runner;
}

GpuRunner::GpuRunner(const ModelRunnerOptions& options, ModelConfig config, Stream stream,
                     Transformer<bf16> transformer)
    : ModelRunner(options, std::move(config)),
      stream_(std::move(stream)),
      transformer_(std::move(transformer)),
      target_(&transformer_, this->config().num_layers, LaneLimits()) {}

GpuRunner::~GpuRunner() { stream_.Synchronize(); }

GpuLaneLimits GpuRunner::LaneLimits() const {
  return {options().max_rows, options().max_slots, options().max_logit_rows, options().max_biases,
          config().max_position};
}

absl::Status GpuRunner::LoadDraft(const StepLimits& limits) {
  if (options().draft_layers > 0) draft_.emplace(&transformer_, options().draft_layers, LaneLimits());
  if (options().draft_model_dir.empty()) return absl::OkStatus();
  auto config = LoadDraftConfig(options().draft_model_dir, this->config());
  if (!config.ok()) return config.status();
  const auto checkpoint = Checkpoint::Open(options().draft_model_dir);
  if (!checkpoint.ok()) return checkpoint.status();
  auto transformer = Transformer<bf16>::Load(*config, *checkpoint, limits, stream_);
  if (!transformer.ok()) return transformer.status();
  draft_transformer_.emplace(*std::move(transformer));
  draft_config_ = *std::move(config);
  draft_.emplace(&*draft_transformer_, draft_config_->num_layers, LaneLimits());
  return absl::OkStatus();
}

void GpuRunner::PlaceOnDevice(Carver carver, size_t* used) {
  last_tokens_ = carver.TakeVec<int32_t>(int64_t{options().max_slots} * (1 + kMaxDrafts));
  history_ = carver.TakeMat<TokenCount>(options().max_slots, config().vocab_size);
  *used = carver.used();
}

void GpuRunner::PlaceShared(Carver carver, size_t* used) {
  const int64_t logit_rows = options().max_logit_rows;
  for (StagedLogProbs& staged : logprobs_) {
    staged = {.chosen = carver.TakeVec<float>(logit_rows),
              .top_values = carver.TakeVec<float>(logit_rows * kMaxTopTokens),
              .top_tokens = carver.TakeVec<int32_t>(logit_rows * kMaxTopTokens)};
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
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", device_bytes, " bytes of token histories of ",
                                                     options().max_slots, " slots, and ", shared_bytes,
                                                     " bytes shared with the host"));
  }
  PlaceOnDevice(Carver(device_memory_.data()), &device_bytes);
  PlaceShared(Carver(shared_memory_.data()), &shared_bytes);
  absl::Status status = target_.TakeMemory(last_tokens_, stream_);
  if (draft_.has_value()) status.Update(draft_->TakeMemory(last_tokens_, stream_));
  return status;
}

// Of every block the draft model has its own part.
absl::Status GpuRunner::TakePool(int64_t free_before) {
  const auto kv_bytes = PoolBytes(options(), free_before, stream_);
  if (!kv_bytes.ok()) return kv_bytes.status();
  const int64_t own = KvCache<bf16>::BlockBytes(config());
  const int64_t drafts = draft_config_.has_value() ? KvCache<bf16>::BlockBytes(*draft_config_) : 0;
  auto kv = KvCache<bf16>::Allocate(config(), drafts == 0 ? *kv_bytes : *kv_bytes / (own + drafts) * own, stream_);
  if (!kv.ok()) return kv.status();
  kv_ = *std::move(kv);
  max_context_ = std::min(config().max_position, kv_.num_blocks() * kBlockTokens);
  if (drafts == 0) return absl::OkStatus();
  auto draft_kv = KvCache<bf16>::Allocate(*draft_config_, kv_.num_blocks() * drafts, stream_);
  if (!draft_kv.ok()) return draft_kv.status();
  draft_kv_ = *std::move(draft_kv);
  return absl::OkStatus();
}

void GpuRunner::RecordGraphs() {
  target_.RecordGraphs(&kv_, history_, true, stream_);
  if (draft_.has_value()) draft_->RecordGraphs(draft_config_.has_value() ? &draft_kv_ : &kv_, history_, false, stream_);
}

// Guess j of slot s is kept as the last token of a slot s + j * max_slots, which does not exist otherwise. So it goes
// from pass to pass and into the step without the host.
void GpuRunner::LaunchDrafts(const StepInput& input) {
  step_input_ = input;
  drafted_.assign(input.tokens.size(), nullptr);
  for (const DraftInput& draft : input.drafts) {
    const int32_t row = input.query_start[static_cast<size_t>(draft.sequence)];
    for (int32_t j = 1; j <= draft.count; ++j) {
      const int32_t slot = input.slots[static_cast<size_t>(draft.first_logit_row)];
      step_input_.tokens[static_cast<size_t>(row + j)] = ~(slot + j * options().max_slots);
    }
  }
  const Vec<const int32_t> tokens = {step_input_.tokens.data(), input.num_rows()};
  const int32_t num_passes = NumDraftPasses(input);
  for (int32_t pass = 0; pass < num_passes; ++pass) {
    FillDraftPass(input, pass, tokens, draft_input_, guess_rows_);
    const Vec<const int32_t> guesses = draft_->Launch(draft_input_, stream_);
    for (size_t r = 0; r < guess_rows_.size(); ++r) drafted_[static_cast<size_t>(guess_rows_[r])] = guesses.data + r;
  }
  stream_.Mark(kDraftMark);
}

void GpuRunner::Launch(const StepInput& input) {
  Check(input, max_context_);
  MILLRACE_CHECK(launched_ - awaited_ < kMaxFlights, "the results of earlier steps were taken");
  const auto turn = static_cast<int>(launched_++ % kMaxFlights);
  Flight& flight = flights_[turn];
  flight.launched = std::chrono::steady_clock::now();
  flight.drafts = !input.drafts.empty();
  if (flight.drafts) LaunchDrafts(input);
  const auto logit_rows = static_cast<int64_t>(input.logit_rows.size());
  flight.chosen = target_.Launch(flight.drafts ? step_input_ : input, stream_);
  flight.num_logprobs = input.num_logprobs;
  flight.guesses.clear();
  for (size_t r = 0; r < input.logit_rows.size(); ++r) {
    if (!input.is_guess[r]) continue;
    const auto row = static_cast<size_t>(input.logit_rows[r]);
    flight.guesses.push_back({r, input.tokens[row], flight.drafts ? drafted_[row] : nullptr});
  }
  flight.most_logprobs = logit_rows == 0 ? -1 : std::ranges::max(input.num_logprobs);
  if (flight.most_logprobs >= 0) {
    MILLRACE_CHECK(flight.most_logprobs <= kMaxTopTokens, "no more top tokens than there is room for",
                   flight.most_logprobs);
    const StagedLogProbs& to = logprobs_[turn];
    LogProbs({to.chosen.data, logit_rows}, {to.top_values.data, logit_rows, flight.most_logprobs},
             {to.top_tokens.data, logit_rows, flight.most_logprobs}, target_.logits(logit_rows),
             target_.chosen(logit_rows), stream_);
  }
  stream_.Mark(turn);
}

void GpuRunner::Await(StepOutput& output) {
  MILLRACE_CHECK(awaited_ < launched_, "a step is under way");
  const auto turn = static_cast<int>(awaited_++ % kMaxFlights);
  const Flight& flight = flights_[turn];
  output.draft_us = 0;
  if (flight.drafts) {
    stream_.AwaitMark(kDraftMark);
    const auto taken = std::chrono::steady_clock::now() - flight.launched;
    output.draft_us = std::chrono::duration<double, std::micro>(taken).count();
  }
  stream_.AwaitMark(turn);
  const size_t count = flight.num_logprobs.size();
  output.tokens.assign(flight.chosen.data, flight.chosen.data + count);
  output.logprobs.assign(count, {});
  for (const Guess& guess : flight.guesses) {
    const int32_t guessed = guess.drafted != nullptr ? *guess.drafted : guess.token;
    if (output.tokens[guess.logit_row - 1] != guessed) output.tokens[guess.logit_row] = kNotReached;
  }
  for (size_t r = 0; r < count; ++r) {
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
