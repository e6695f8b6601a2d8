#include "worker/model/model_runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/buffer.h"
#include "kernels/check.h"
#include "kernels/ops.h"
#include "worker/model/checkpoint.h"
#include "worker/model/kv_cache.h"
#include "worker/model/transformer.h"

namespace millrace {
namespace {

constexpr int kMaxSlots = 1 << 16;
constexpr int kMaxRows = 1 << 17;

absl::Status CheckOptions(const ModelRunnerOptions& options) {
  const auto check = [](absl::string_view name, int64_t value, int64_t limit) {
    if (value >= 1 && value <= limit) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, "; the limits are 1 and ", limit));
  };
  absl::Status status = check("max_slots", options.max_slots, kMaxSlots);
  status.Update(check("max_rows", options.max_rows, kMaxRows));
  status.Update(check("max_logit_rows", options.max_logit_rows, kMaxRows));
  return status;
}

bool AllWithin(const std::vector<int32_t>& values, int64_t min, int64_t end) {
  return std::ranges::all_of(values, [&](int32_t value) { return value >= min && value < end; });
}

}  // namespace

// `stream` comes first: what follows holds its memory.
struct ModelRunner::Parts {
  Stream stream;
  ModelRunnerOptions options;
  ModelConfig config;
  KvCache<float> kv;
  Transformer<float> transformer;
  int64_t max_context;
  DeviceBuffer history_memory;
  Mat<TokenCount> history;          // [max_slots, V]; pages of slots without penalties are never touched
  std::vector<bool> has_history;    // [max_slots]
  std::vector<float> chosen;        // [R] log-probabilities, and of the likeliest tokens
  std::vector<float> top_values;    // [R, N]
  std::vector<int32_t> top_tokens;  // [R, N]

  void Check(const StepInput& input) const;
  void SampleRows(const StepInput& input, Mat<const float> logits, std::vector<int32_t>& tokens);
  void FillLogProbs(const StepInput& input, Mat<const float> logits, StepOutput& output);
};

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Load(const ModelRunnerOptions& options, Stream stream) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  auto config = ModelConfig::Load(options.model_dir);
  if (!config.ok()) return config.status();
  const auto checkpoint = Checkpoint::Open(options.model_dir);
  if (!checkpoint.ok()) return checkpoint.status();
  auto kv = KvCache<float>::Allocate(*config, options.kv_bytes, stream);
  if (!kv.ok()) return kv.status();
  const int64_t max_context = std::min(config->max_position, kv->num_blocks() * kBlockTokens);
  auto transformer =
      Transformer<float>::Load(*config, *checkpoint, {options.max_rows, options.max_logit_rows, max_context}, stream);
  if (!transformer.ok()) return transformer.status();
  stream.ReserveWorkspace(SampleWorkspaceBytes(config->vocab_size, stream));

  const int64_t history_size = int64_t{options.max_slots} * config->vocab_size;
  DeviceBuffer history_memory(static_cast<size_t>(history_size) * sizeof(TokenCount), stream);
  if (history_memory.data() == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for the token histories of ", options.max_slots, " slots"));
  }
  const Mat<TokenCount> history = {history_memory.At<TokenCount>(0, history_size), options.max_slots,
                                   config->vocab_size};
  return std::unique_ptr<ModelRunner>(
      new ModelRunner(std::unique_ptr<Parts>(new Parts{std::move(stream),
                                                       options,
                                                       *std::move(config),
                                                       *std::move(kv),
                                                       *std::move(transformer),
                                                       max_context,
                                                       std::move(history_memory),
                                                       history,
                                                       std::vector<bool>(static_cast<size_t>(options.max_slots)),
                                                       {},
                                                       {},
                                                       {}})));
}

ModelRunner::ModelRunner(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
ModelRunner::~ModelRunner() = default;

const ModelConfig& ModelRunner::config() const { return parts_->config; }
const ModelRunnerOptions& ModelRunner::options() const { return parts_->options; }
int64_t ModelRunner::num_blocks() const { return parts_->kv.num_blocks(); }
int64_t ModelRunner::block_bytes() const { return KvCache<float>::BlockBytes(parts_->config); }

void ModelRunner::Run(const StepInput& input, StepOutput& output) {
  parts_->Check(input);
  const Mat<const float> logits = parts_->transformer.Forward(ForwardInput::View(input), parts_->kv, parts_->stream);
  parts_->SampleRows(input, logits, output.tokens);
  parts_->FillLogProbs(input, logits, output);
  parts_->stream.Synchronize();
}

void ModelRunner::Parts::Check(const StepInput& input) const {
  const auto num_rows = input.num_rows(), num_sequences = static_cast<int64_t>(input.context_len.size());
  const size_t num_logit_rows = input.logit_rows.size();
  MILLRACE_CHECK(num_rows >= 1 && num_rows <= options.max_rows, "a step has 1 to max_rows rows", num_rows);
  MILLRACE_CHECK(num_logit_rows <= static_cast<size_t>(options.max_logit_rows),
                 "a step has at most max_logit_rows logit rows", static_cast<int64_t>(num_logit_rows));
  MILLRACE_CHECK(input.positions.size() == input.tokens.size() && input.kv_slots.size() == input.tokens.size(),
                 "every row has a position and a slot", num_rows);
  MILLRACE_CHECK(input.sampling.size() == num_logit_rows && input.target.size() == num_logit_rows &&
                     input.num_logprobs.size() == num_logit_rows,
                 "every logit row says how to sample it", static_cast<int64_t>(num_logit_rows));
  MILLRACE_CHECK(input.query_start.size() == static_cast<size_t>(num_sequences + 1) && input.query_start.front() == 0 &&
                     input.query_start.back() == num_rows && std::ranges::is_sorted(input.query_start),
                 "the rows are divided among the sequences", num_rows, num_sequences);
  MILLRACE_CHECK(static_cast<int64_t>(input.block_table.size()) == num_sequences * input.block_table_width,
                 "the block table has a row for every sequence", num_sequences, input.block_table_width);
  MILLRACE_CHECK(AllWithin(input.tokens, 0, config.vocab_size), "tokens are in the vocabulary", config.vocab_size);
  MILLRACE_CHECK(AllWithin(input.positions, 0, max_context), "positions are within the context", max_context);
  MILLRACE_CHECK(AllWithin(input.kv_slots, -1, kv.num_blocks() * kBlockTokens), "kv slots are in the pool",
                 kv.num_blocks());
  MILLRACE_CHECK(AllWithin(input.block_table, 0, kv.num_blocks()), "block ids are in the pool", kv.num_blocks());
  MILLRACE_CHECK(AllWithin(input.context_len, 1, std::min(max_context, input.block_table_width * kBlockTokens) + 1),
                 "contexts are within their block tables", max_context, input.block_table_width);
  MILLRACE_CHECK(AllWithin(input.logit_rows, 0, num_rows), "logit rows are rows of the step", num_rows);
  MILLRACE_CHECK(AllWithin(input.target, -1, config.vocab_size), "targets are in the vocabulary", config.vocab_size);
  MILLRACE_CHECK(AllWithin(input.num_logprobs, -1, config.vocab_size + 1), "no more logprobs than tokens",
                 config.vocab_size);
}

// Runs of rows that are treated alike go to the kernels in one call.
void ModelRunner::Parts::SampleRows(const StepInput& input, Mat<const float> logits, std::vector<int32_t>& tokens) {
  tokens = input.target;
  const Vec<const LogitBias> biases = {input.biases.data(), static_cast<int64_t>(input.biases.size())};
  for (int64_t begin = 0, end; begin < logits.rows; begin = end) {
    const auto is_sampled = [&](int64_t row) { return input.target[static_cast<size_t>(row)] < 0; };
    for (end = begin + 1; end < logits.rows && is_sampled(end) == is_sampled(begin);) ++end;
    if (!is_sampled(begin)) continue;
    const int64_t count = end - begin;
    Sample({tokens.data() + begin, count}, logits.Rows(begin, count), {input.sampling.data() + begin, count}, biases,
           history, stream);
  }
}

void ModelRunner::Parts::FillLogProbs(const StepInput& input, Mat<const float> logits, StepOutput& output) {
  output.logprobs.resize(input.num_logprobs.size());
  // -1 where none are wanted, or where no token could be chosen.
  const auto wanted = [&](int64_t row) {
    const auto r = static_cast<size_t>(row);
    return output.tokens[r] < 0 ? -1 : input.num_logprobs[r];
  };
  for (int64_t begin = 0, end; begin < logits.rows; begin = end) {
    const int64_t num_top = wanted(begin);
    for (end = begin + 1; end < logits.rows && wanted(end) == num_top;) ++end;
    if (num_top < 0) continue;
    const int64_t count = end - begin;
    chosen.resize(static_cast<size_t>(count));
    top_values.resize(static_cast<size_t>(count * num_top));
    top_tokens.resize(static_cast<size_t>(count * num_top));
    LogProbs({chosen.data(), count}, {top_values.data(), count, num_top}, {top_tokens.data(), count, num_top},
             logits.Rows(begin, count), {output.tokens.data() + begin, count}, stream);
    stream.Synchronize();
    for (int64_t i = 0; i < count; ++i) {
      TokenLogProbs& row = output.logprobs[static_cast<size_t>(begin + i)];
      row.chosen = chosen[static_cast<size_t>(i)];
      row.top_values.assign(top_values.begin() + i * num_top, top_values.begin() + (i + 1) * num_top);
      row.top_tokens.assign(top_tokens.begin() + i * num_top, top_tokens.begin() + (i + 1) * num_top);
    }
  }
}

void ModelRunner::ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) {
  MILLRACE_CHECK(slot >= 0 && slot < parts_->options.max_slots, "history slots are below max_slots", slot);
  TokenCount* const row = parts_->history.row(slot);
  std::vector<bool>::reference has_history = parts_->has_history[static_cast<size_t>(slot)];
  if (has_history) std::memset(row, 0, static_cast<size_t>(parts_->history.cols) * sizeof(TokenCount));
  has_history = true;
  for (int64_t i = 0; i < prompt.size; ++i) {
    MILLRACE_CHECK(prompt[i] >= 0 && prompt[i] < parts_->config.vocab_size, "prompt tokens are in the vocabulary",
                   prompt[i]);
    row[prompt[i]] |= kPromptToken;
  }
  for (int64_t i = 0; i < output.size; ++i) CountToken(slot, output[i]);
}

void ModelRunner::CountToken(int slot, int32_t token) {
  MILLRACE_CHECK(slot >= 0 && slot < parts_->options.max_slots, "history slots are below max_slots", slot);
  MILLRACE_CHECK(token >= 0 && token < parts_->config.vocab_size, "output tokens are in the vocabulary", token);
  ++parts_->history.row(slot)[token];
  parts_->has_history[static_cast<size_t>(slot)] = true;
}

}  // namespace millrace
