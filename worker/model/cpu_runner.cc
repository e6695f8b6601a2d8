#include "worker/model/cpu_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/ops.h"

namespace millrace {

absl::StatusOr<std::unique_ptr<ModelRunner>> CpuRunner::Load(const ModelRunnerOptions& options, ModelConfig config,
                                                             const Checkpoint& checkpoint, Stream stream) {
  std::optional<ModelConfig> draft_config;
  if (!options.draft_model_dir.empty()) {
    auto loaded = LoadDraftConfig(options.draft_model_dir, config);
    if (!loaded.ok()) return loaded.status();
    draft_config = *std::move(loaded);
  }
  // Of every block the draft model has its own part.
  const int64_t block_bytes = KvCache<float>::BlockBytes(config);
  const int64_t draft_bytes = draft_config.has_value() ? KvCache<float>::BlockBytes(*draft_config) : 0;
  const int64_t kv_bytes = options.kv_bytes / (block_bytes + draft_bytes) * block_bytes;
  auto kv = KvCache<float>::Allocate(config, draft_bytes > 0 ? kv_bytes : options.kv_bytes, stream);
  if (!kv.ok()) return kv.status();
  const int64_t max_context = std::min(config.max_position, kv->num_blocks() * kBlockTokens);
  const StepLimits limits = {options.max_rows, options.max_logit_rows, max_context};
  auto transformer = Transformer<float>::Load(config, checkpoint, limits, stream);
  if (!transformer.ok()) return transformer.status();
  std::unique_ptr<LoadedDraft> draft;
  if (draft_config.has_value()) {
    auto loaded = LoadedDraft::Load(*draft_config, options.draft_model_dir, kv->num_blocks(), limits, stream);
    if (!loaded.ok()) return loaded.status();
    draft = *std::move(loaded);
  }
  stream.ReserveWorkspace(SampleWorkspaceBytes(config.vocab_size, stream));
  const int64_t history_size = int64_t{options.max_slots} * config.vocab_size;
  DeviceBuffer history_memory(static_cast<size_t>(history_size) * sizeof(TokenCount), stream);
  if (history_memory.data() == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for the token histories of ", options.max_slots, " slots"));
  }
  return std::unique_ptr<ModelRunner>(new CpuRunner(options, std::move(config), std::move(stream), *std::move(kv),
                                                    *std::move(transformer), max_context, std::move(history_memory),
                                                    std::move(draft)));
}

CpuRunner::CpuRunner(const ModelRunnerOptions& options, ModelConfig config, Stream stream, KvCache<float> kv,
                     Transformer<float> transformer, int64_t max_context, DeviceBuffer history_memory,
                     std::unique_ptr<LoadedDraft> loaded_draft)
    : ModelRunner(options, std::move(config)),
      stream_(std::move(stream)),
      kv_(std::move(kv)),
      transformer_(std::move(transformer)),
      max_context_(max_context),
      history_memory_(std::move(history_memory)),
      history_{history_memory_.At<TokenCount>(0, int64_t{options.max_slots} * this->config().vocab_size),
               options.max_slots, this->config().vocab_size},
      loaded_draft_(std::move(loaded_draft)) {
  if (loaded_draft_ != nullptr) {
    draft_.emplace(loaded_draft_->transformer, loaded_draft_->kv, loaded_draft_->config.num_layers, options.max_rows);
  } else if (options.draft_layers > 0) {
    draft_.emplace(transformer_, kv_, options.draft_layers, options.max_rows);
  }
}

void CpuRunner::Launch(const StepInput& input) {
  Check(input, max_context_);
  const auto begin = std::chrono::steady_clock::now();
  tokens_ = input.tokens;
  if (!input.drafts.empty()) draft_->Guess(input, history_, tokens_, stream_);
  output_.draft_us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  ForwardInput in = ForwardInput::View(input);
  in.tokens = {tokens_.data(), input.num_rows()};
  const Mat<const float> logits = transformer_.Forward(in, kv_, stream_);
  SampleRows(input, logits, output_.tokens);
  FillLogProbs(input, logits, output_);
}

void CpuRunner::Await(StepOutput& output) { std::swap(output, output_); }

// Whatever is sampled there is what the sequence's next token would be without guesses.
bool CpuRunner::IsReached(const StepInput& input, int64_t row, const std::vector<int32_t>& tokens) const {
  const auto r = static_cast<size_t>(row);
  return !input.is_guess[r] || tokens[r - 1] == tokens_[static_cast<size_t>(input.logit_rows[r])];
}

// Runs of rows that are treated alike go to the kernels in one call. A row after a guess is sampled beside the one that
// decides whether it counts, unless its history depends on that.
void CpuRunner::SampleRows(const StepInput& input, Mat<const float> logits, std::vector<int32_t>& tokens) {
  tokens = input.target;
  const Vec<const LogitBias> biases = {input.biases.data(), static_cast<int64_t>(input.biases.size())};
  for (int64_t begin = 0, end; begin < logits.rows; begin = end) {
    const auto is_sampled = [&](int64_t row) { return input.target[static_cast<size_t>(row)] < 0; };
    const auto waits = [&](int64_t row) {
      return input.is_guess[static_cast<size_t>(row)] && input.sampling[static_cast<size_t>(row)].history >= 0;
    };
    for (end = begin + 1; end < logits.rows && is_sampled(end) == is_sampled(begin) && !waits(end);) ++end;
    if (!is_sampled(begin)) continue;
    const int64_t count = end - begin;
    Sample({tokens.data() + begin, count}, logits.Rows(begin, count), {input.sampling.data() + begin, count}, biases,
           history_, stream_);
    for (int64_t r = begin; r < end; ++r) {
      if (!IsReached(input, r, tokens)) tokens[static_cast<size_t>(r)] = kNotReached;
    }
    CountTokens(history_, {input.sampling.data() + begin, count}, {tokens.data() + begin, count}, stream_);
  }
}

void CpuRunner::FillLogProbs(const StepInput& input, Mat<const float> logits, StepOutput& output) {
  output.logprobs.resize(input.num_logprobs.size());
  // -1 where none are wanted, or where no token could be chosen_.
  const auto wanted = [&](int64_t row) {
    const auto r = static_cast<size_t>(row);
    return output.tokens[r] < 0 ? -1 : input.num_logprobs[r];
  };
  for (int64_t begin = 0, end; begin < logits.rows; begin = end) {
    const int64_t num_top = wanted(begin);
    for (end = begin + 1; end < logits.rows && wanted(end) == num_top;) ++end;
    if (num_top < 0) continue;
    const int64_t count = end - begin;
    chosen_.resize(static_cast<size_t>(count));
    top_values_.resize(static_cast<size_t>(count * num_top));
    top_tokens_.resize(static_cast<size_t>(count * num_top));
    LogProbs({chosen_.data(), count}, {top_values_.data(), count, num_top}, {top_tokens_.data(), count, num_top},
             logits.Rows(begin, count), {output.tokens.data() + begin, count}, stream_);
    stream_.Synchronize();
    for (int64_t i = 0; i < count; ++i) {
      TokenLogProbs& row = output.logprobs[static_cast<size_t>(begin + i)];
      row.chosen = chosen_[static_cast<size_t>(i)];
      row.top_values.assign(top_values_.begin() + i * num_top, top_values_.begin() + (i + 1) * num_top);
      row.top_tokens.assign(top_tokens_.begin() + i * num_top, top_tokens_.begin() + (i + 1) * num_top);
    }
  }
}

void CpuRunner::ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) {
  std::ranges::copy(CountHistory(slot, prompt, output), history_.row(slot));
}

}  // namespace millrace
