// A loaded model with its KV pool, ready to compute steps. Built at start-up, lives as long as the worker; used by the
// engine thread. All memory is taken here; Run allocates nothing on the device.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/stream.h"
#include "worker/model/model_config.h"
#include "worker/model/step.h"

namespace millrace {

struct ModelRunnerOptions {
  std::filesystem::path model_dir;  // a Hugging Face folder: config.json and safetensors
  int64_t kv_bytes = 0;             // memory for the KV pool; must hold at least one block
  int max_slots = 256;              // sequences with token histories (penalties)
  int max_rows = 2048;              // T of the largest step
  int max_logit_rows = 512;         // R of the largest step
};

class ModelRunner {
 public:
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Load(const ModelRunnerOptions& options, Stream stream);
  ~ModelRunner();

  const ModelConfig& config() const;
  const ModelRunnerOptions& options() const;
  int64_t num_blocks() const;   // of kBlockTokens tokens
  int64_t block_bytes() const;  // all layers, k and v

  // REQUIRES: the input is consistent and within the limits above (the engine's packer sees to it).
  void Run(const StepInput& input, StepOutput& output);

  // The token history of a slot, for penalties: Reset forgets it and takes the prompt, Count adds output tokens.
  void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output);
  void CountToken(int slot, int32_t token);

 private:
  struct Parts;
  explicit ModelRunner(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace millrace
