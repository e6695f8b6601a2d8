#include "worker/model/cpu_draft.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"
#include "kernels/ops.h"
#include "worker/model/draft_pass.h"

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

// The history is that of the tokens sampled so far, without the guesses: under penalties they are a little worse for
// it.
void CpuDraft::Guess(const StepInput& input, Mat<const TokenCount> history, std::vector<int32_t>& tokens,
                     Stream& stream) {
  std::ranges::replace(tokens, kGuessedToken, 0);
  const int32_t num_passes = NumDraftPasses(input);
  for (int32_t pass = 0; pass < num_passes; ++pass) {
    FillDraftPass(input, pass, {tokens.data(), input.num_rows()}, step_, guess_rows_);
    MILLRACE_CHECK(step_.num_rows() <= max_rows_, "drafts have room for what they read", step_.num_rows(), max_rows_);
    const Mat<const float> logits = transformer_.ForwardFirst(num_layers_, ForwardInput::View(step_), kv_, stream);
    if (logits.rows == 0) continue;
    sampled_.resize(guess_rows_.size());
    Sample({sampled_.data(), logits.rows}, logits, {step_.sampling.data(), logits.rows},
           {step_.biases.data(), static_cast<int64_t>(step_.biases.size())}, history, stream);
    for (size_t r = 0; r < guess_rows_.size(); ++r) {
      tokens[static_cast<size_t>(guess_rows_[r])] = std::max(0, sampled_[r]);
    }
  }
}

}  // namespace millrace
