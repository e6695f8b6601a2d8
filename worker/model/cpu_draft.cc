#include "worker/model/cpu_draft.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"
#include "kernels/ops.h"

namespace millrace {

absl::StatusOr<std::unique_ptr<LoadedDraft>> LoadedDraft::Load(ModelConfig config,
                                                               const std::filesystem::path& model_dir,
                                                               int64_t num_blocks, const StepLimits& limits,
                                                               Stream& stream) {
  const auto checkpoint = Checkpoint::Open(model_dir);
  if (!checkpoint.ok()) return checkpoint.status();
  auto kv = KvCache<float>::Allocate(config, num_blocks * KvCache<float>::BlockBytes(config), stream);
  if (!kv.ok()) return kv.status();
  auto transformer = Transformer<float>::Load(config, *checkpoint, limits, stream);
  if (!transformer.ok()) return transformer.status();
  return std::make_unique<LoadedDraft>(LoadedDraft{std::move(config), *std::move(kv), *std::move(transformer)});
}

void CpuDraft::AddRow(const StepInput& input, int32_t sequence, int32_t token, int32_t position) {
  const int64_t entry = sequence * input.block_table_width + position / kBlockTokens;
  step_.tokens.push_back(token);
  step_.positions.push_back(position);
  step_.kv_slots.push_back(input.block_table[static_cast<size_t>(entry)] * kBlockTokens + position % kBlockTokens);
}

void CpuDraft::EndSequence(const StepInput& input, int32_t sequence, int32_t context) {
  step_.query_start.push_back(static_cast<int32_t>(step_.num_rows()));
  step_.context_len.push_back(context);
  const auto row = input.block_table.begin() + sequence * input.block_table_width;
  step_.block_table.insert(step_.block_table.end(), row, row + input.block_table_width);
}

void CpuDraft::Compute(const StepInput& input, Mat<const TokenCount> history, Stream& stream) {
  MILLRACE_CHECK(step_.num_rows() <= max_rows_, "drafts have room for what they read", step_.num_rows(), max_rows_);
  step_.block_table_width = input.block_table_width;
  const Mat<const float> logits = transformer_.ForwardFirst(num_layers_, ForwardInput::View(step_), kv_, stream);
  sampled_.assign(static_cast<size_t>(logits.rows), 0);
  if (logits.rows == 0) return;
  Sample({sampled_.data(), logits.rows}, logits, {step_.sampling.data(), logits.rows},
         {input.biases.data(), static_cast<int64_t>(input.biases.size())}, history, stream);
}

// One pass a guess, each of the sequences that want another one. The history is that of the tokens sampled so far,
// without the guesses: under penalties they are a little worse for it.
void CpuDraft::Guess(const StepInput& input, Mat<const TokenCount> history, std::vector<int32_t>& tokens,
                     Stream& stream) {
  int32_t most = 1;
  for (const DraftInput& draft : input.drafts) most = std::max(most, draft.count);
  for (int32_t j = 0; j < most; ++j) {
    step_.Clear();
    step_.query_start.push_back(0);
    for (const DraftInput& draft : input.drafts) {
      if (j > 0 && draft.count <= j) continue;
      const int32_t first_row = input.query_start[static_cast<size_t>(draft.sequence)];
      int32_t position = draft.position;
      if (j == 0) {
        for (int32_t i = draft.unread_begin; i < draft.unread_end; ++i) {
          AddRow(input, draft.sequence, input.unread[static_cast<size_t>(i)], position++);
        }
      } else {
        position = input.positions[static_cast<size_t>(first_row + j)];
        AddRow(input, draft.sequence, tokens[static_cast<size_t>(first_row + j)], position++);
      }
      EndSequence(input, draft.sequence, position);
      if (draft.count <= j) continue;
      step_.logit_rows.push_back(static_cast<int32_t>(step_.num_rows()) - 1);
      step_.sampling.push_back(input.sampling[static_cast<size_t>(draft.first_logit_row + j)]);
    }
    Compute(input, history, stream);
    size_t r = 0;
    for (const DraftInput& draft : input.drafts) {
      if (draft.count <= j) continue;
      const int32_t row = input.query_start[static_cast<size_t>(draft.sequence)] + j + 1;
      tokens[static_cast<size_t>(row)] = std::max(0, sampled_[r++]);
    }
  }
}

}  // namespace millrace
