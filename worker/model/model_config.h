// The shape of a model, from config.json (both the transformers 4 and 5 spellings) and generation_config.json. A value,
// constant after Load. Every number is checked against the limits below before anything is allocated from it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace millrace {

enum class Architecture : uint8_t { kLlama, kQwen2, kQwen3 };

struct RopeScaling {
  enum class Type : uint8_t { kNone, kLinear, kLlama3, kYarn } type = Type::kNone;
  double factor = 1;
  double original_max_position = 0;
  double low_freq_factor = 1, high_freq_factor = 4;            // llama3
  double beta_fast = 32, beta_slow = 1, attention_factor = 0;  // yarn; attention_factor 0: 0.1 ln(factor) + 1
  double mscale = 0, mscale_all_dim = 0;                       // yarn, where a config gives them
};

struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  int32_t vocab_size = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;  // a multiple of 16, at most 256
  int64_t max_position = 0;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  float rms_norm_eps = 1e-6f;
  bool qkv_bias = false;
  bool qk_norm = false;
  bool tied_embeddings = false;
  std::vector<int32_t> eos_token_ids;  // a list in generation_config.json wins over config.json's single id

  static absl::StatusOr<ModelConfig> Load(const std::filesystem::path& model_dir);
};

// Of a model that drafts for `target`: it must have the same vocabulary, and positions for as long a context.
absl::StatusOr<ModelConfig> LoadDraftConfig(const std::filesystem::path& model_dir, const ModelConfig& target);

}  // namespace millrace
