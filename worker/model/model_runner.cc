#include "worker/model/model_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "worker/model/checkpoint.h"
#include "worker/model/cpu_runner.h"
#include "worker/model/gpu_runner.h"

namespace millrace {
namespace {

constexpr int kMaxSlots = (1 << 16) - 1;
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

absl::Status CheckDraft(const ModelRunnerOptions& options, const ModelConfig& config) {
  if (options.draft_layers < 0 || options.draft_layers >= config.num_layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("draft_layers is ", options.draft_layers, "; the limits are 0 and ", config.num_layers - 1));
  }
  if (!options.draft_model_dir.empty() && options.draft_layers > 0) {
    return absl::InvalidArgumentError(absl::StrCat("draft_layers is ", options.draft_layers,
                                                   " and there is a draft model; the limit is one of them"));
  }
  return absl::OkStatus();
}

bool AllWithin(const std::vector<int32_t>& values, int64_t min, int64_t end) {
  return std::ranges::all_of(values, [&](int32_t value) { return value >= min && value < end; });
}

}  // namespace

ModelRunner::ModelRunner(const ModelRunnerOptions& options, ModelConfig config)
    : options_(options), config_(std::move(config)) {}

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Load(const ModelRunnerOptions& options, Stream stream) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  auto config = ModelConfig::Load(options.model_dir);
  if (!config.ok()) return config.status();
  if (absl::Status status = CheckDraft(options, *config); !status.ok()) return status;
  const auto checkpoint = Checkpoint::Open(options.model_dir);
  if (!checkpoint.ok()) return checkpoint.status();
  return stream.device() == Device::kCpu ? CpuRunner::Load(options, *std::move(config), *checkpoint, std::move(stream))
                                         : GpuRunner::Load(options, *std::move(config), *checkpoint, std::move(stream));
}

DraftModel ModelRunner::draft_model() const {
  if (!options_.draft_model_dir.empty()) return DraftModel::kOwnCache;
  return options_.draft_layers > 0 ? DraftModel::kSharedCache : DraftModel::kNone;
}

void ModelRunner::Check(const StepInput& input, int64_t max_context) const {
  const auto num_rows = input.num_rows(), num_sequences = static_cast<int64_t>(input.context_len.size());
  const size_t num_logit_rows = input.logit_rows.size();
  MILLRACE_CHECK(num_rows >= 1 && num_rows <= options_.max_rows, "a step has 1 to max_rows rows", num_rows);
  MILLRACE_CHECK(num_logit_rows <= static_cast<size_t>(options_.max_logit_rows),
                 "a step has at most max_logit_rows logit rows", static_cast<int64_t>(num_logit_rows));
  MILLRACE_CHECK(input.positions.size() == input.tokens.size() && input.kv_slots.size() == input.tokens.size(),
                 "every row has a position and a slot", num_rows);
  MILLRACE_CHECK(input.sampling.size() == num_logit_rows && input.target.size() == num_logit_rows &&
                     input.num_logprobs.size() == num_logit_rows && input.slots.size() == num_logit_rows &&
                     input.is_guess.size() == num_logit_rows,
                 "every logit row says how to sample it", static_cast<int64_t>(num_logit_rows));
  MILLRACE_CHECK(num_sequences <= options_.max_slots, "a step has at most max_slots sequences", num_sequences);
  MILLRACE_CHECK(input.query_start.size() == static_cast<size_t>(num_sequences + 1) && input.query_start.front() == 0 &&
                     input.query_start.back() == num_rows && std::ranges::is_sorted(input.query_start),
                 "the rows are divided among the sequences", num_rows, num_sequences);
  MILLRACE_CHECK(static_cast<int64_t>(input.block_table.size()) == num_sequences * input.block_table_width,
                 "the block table has a row for every sequence", num_sequences, input.block_table_width);
  const int32_t first_token = max_steps_in_flight() > 1 ? -options_.max_slots : 0;
  const auto is_token = [&](int32_t t) { return t == kGuessedToken || (t >= first_token && t < config_.vocab_size); };
  MILLRACE_CHECK(std::ranges::all_of(input.tokens, is_token),
                 "tokens are in the vocabulary, sampled by a step under way, or to be guessed", config_.vocab_size);
  MILLRACE_CHECK(AllWithin(input.slots, -1, options_.max_slots), "slots are below max_slots", options_.max_slots);
  MILLRACE_CHECK(AllWithin(input.positions, 0, max_context), "positions are within the context", max_context);
  MILLRACE_CHECK(AllWithin(input.kv_slots, -1, num_blocks() * kBlockTokens), "kv slots are in the pool", num_blocks());
  MILLRACE_CHECK(AllWithin(input.block_table, 0, num_blocks()), "block ids are in the pool", num_blocks());
  MILLRACE_CHECK(AllWithin(input.context_len, 1, std::min(max_context, input.block_table_width * kBlockTokens) + 1),
                 "contexts are within their block tables", max_context, input.block_table_width);
  MILLRACE_CHECK(AllWithin(input.logit_rows, 0, num_rows), "logit rows are rows of the step", num_rows);
  MILLRACE_CHECK(AllWithin(input.target, -1, config_.vocab_size), "targets are in the vocabulary", config_.vocab_size);
  MILLRACE_CHECK(AllWithin(input.num_logprobs, -1, config_.vocab_size + 1), "no more logprobs than tokens",
                 config_.vocab_size);
}

std::vector<TokenCount> ModelRunner::CountHistory(int slot, Vec<const int32_t> prompt,
                                                  Vec<const int32_t> output) const {
  MILLRACE_CHECK(slot >= 0 && slot < options_.max_slots, "history slots are below max_slots", slot);
  std::vector<TokenCount> counts(static_cast<size_t>(config_.vocab_size));
  const auto of = [&](int32_t token) -> TokenCount& {
    MILLRACE_CHECK(token >= 0 && token < config_.vocab_size, "tokens of a history are in the vocabulary", token);
    return counts[static_cast<size_t>(token)];
  };
  for (int64_t i = 0; i < prompt.size; ++i) of(prompt[i]) |= kPromptToken;
  for (int64_t i = 0; i < output.size; ++i) ++of(output[i]);
  return counts;
}

}  // namespace millrace
