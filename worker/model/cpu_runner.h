// ModelRunner on the CPU: the host's memory is the device's, float activations, one step at a time.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "kernels/buffer.h"
#include "worker/model/checkpoint.h"
#include "worker/model/cpu_draft.h"
#include "worker/model/kv_cache.h"
#include "worker/model/model_runner.h"
#include "worker/model/transformer.h"

namespace millrace {

class CpuRunner final : public ModelRunner {
 public:
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Load(const ModelRunnerOptions& options, ModelConfig config,
                                                           const Checkpoint& checkpoint, Stream stream);

  int64_t num_blocks() const override { return kv_.num_blocks(); }
  int max_steps_in_flight() const override { return 1; }
  void Launch(const StepInput& input) override;
  void Await(StepOutput& output) override;
  void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) override;

 private:
  CpuRunner(const ModelRunnerOptions& options, ModelConfig config, Stream stream, KvCache<float> kv,
            Transformer<float> transformer, int64_t max_context, DeviceBuffer history_memory,
            std::unique_ptr<LoadedDraft> loaded_draft);
  bool IsReached(const StepInput& input, int64_t row, const std::vector<int32_t>& tokens) const;
  void SampleRows(const StepInput& input, Mat<const float> logits, std::vector<int32_t>& tokens);
  void FillLogProbs(const StepInput& input, Mat<const float> logits, StepOutput& output);

  Stream stream_;  // first: what follows holds its memory
  KvCache<float> kv_;
  Transformer<float> transformer_;
  const int64_t max_context_;
  DeviceBuffer history_memory_;
  Mat<TokenCount> history_;  // [max_slots, V]; pages of slots without penalties are never touched
  std::unique_ptr<LoadedDraft> loaded_draft_;
  std::optional<CpuDraft> draft_;
  std::vector<int32_t> tokens_;      // [T] of the step, guesses included
  StepOutput output_;                // of the step launched
  std::vector<float> chosen_;        // [R] log-probabilities, and of the likeliest tokens
  std::vector<float> top_values_;    // [R, N]
  std::vector<int32_t> top_tokens_;  // [R, N]
};

}  // namespace millrace
