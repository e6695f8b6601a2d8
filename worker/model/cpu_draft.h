// What guesses tokens on the CPU: a model of its own with its own cache, or the first layers of the target over the
// target's. Lives as long as its runner; used by the engine thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/stream.h"
#include "worker/model/kv_cache.h"
#include "worker/model/model_config.h"
#include "worker/model/step.h"
#include "worker/model/transformer.h"

namespace millrace {

// A model whose cache has `num_blocks` blocks, each where the target has the same tokens.
struct LoadedDraft {
  ModelConfig config;
  KvCache<float> kv;
  Transformer<float> transformer;

  static absl::StatusOr<std::unique_ptr<LoadedDraft>> Load(ModelConfig config, const std::filesystem::path& model_dir,
                                                           int64_t num_blocks, const StepLimits& limits,
                                                           Stream& stream);
};

class CpuDraft {
 public:
  // What is referred to outlives it.
  CpuDraft(Transformer<float>& transformer, const KvCache<float>& kv, int num_layers, int64_t max_rows)
      : transformer_(transformer), kv_(kv), num_layers_(num_layers), max_rows_(max_rows) {}

  // Reads what input.drafts names and puts its guesses into `tokens`, the rows of the step. A guess that cannot be
  // sampled, as of logits that are not finite, is token 0.
  void Guess(const StepInput& input, Mat<const TokenCount> history, std::vector<int32_t>& tokens, Stream& stream);

 private:
  Transformer<float>& transformer_;
  const KvCache<float>& kv_;
  const int num_layers_;
  const int64_t max_rows_;
  StepInput step_;  // of a pass
  std::vector<int32_t> guess_rows_, sampled_;
};

}  // namespace millrace
