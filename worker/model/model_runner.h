// A loaded model with its KV pool, ready to compute steps. Built at start-up, lives as long as the worker; used by the
// engine thread. All memory is taken here; a step allocates nothing on the device.
//
// On the CPU a step has ended when Launch returns, its activations and KV are float. On a GPU they are bf16, steps run
// behind the host, and a step in which every sequence has one row is one graph, recorded at start-up for a few numbers
// of sequences.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/stream.h"
#include "worker/model/model.h"
#include "worker/model/model_config.h"

namespace millrace {

struct ModelRunnerOptions {
  std::filesystem::path model_dir;  // a Hugging Face folder: config.json and safetensors
  int64_t kv_bytes = 0;          // memory for the KV pool; must hold at least one block. 0: what device_fraction leaves
  double device_fraction = 0.9;  // of the GPU's free memory for everything, where kv_bytes is 0
  int max_slots = 256;           // sequences of the largest step
  int max_rows = 2048;           // T of the largest step
  int max_logit_rows = 512;      // R of the largest step
  int max_biases = 1 << 16;      // logit biases of the largest step
  // What drafts tokens, at most one of the two: another model of the same vocabulary, whose cache takes its part of
  // kv_bytes, or the first layers of this one. Empty and 0: nothing does.
  std::filesystem::path draft_model_dir = {};
  int draft_layers = 0;
};

class ModelRunner : public Model {
 public:
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Load(const ModelRunnerOptions& options, Stream stream);

  const ModelConfig& config() const { return config_; }
  const ModelRunnerOptions& options() const { return options_; }
  virtual int64_t num_blocks() const = 0;  // of kBlockTokens tokens
  DraftModel draft_model() const override;

 protected:
  ModelRunner(const ModelRunnerOptions& options, ModelConfig config);
  void Check(const StepInput& input, int64_t max_context) const;
  // What ResetHistory writes: counts and marks of a slot's tokens, in order of token.
  std::vector<TokenCount> CountHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) const;

 private:
  const ModelRunnerOptions options_;
  const ModelConfig config_;
};

}  // namespace millrace
