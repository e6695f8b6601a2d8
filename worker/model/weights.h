// A model's weights on the device: views into one allocation, constant after LoadWeights. Matrices are bf16, packed for
// Linear; norms and biases are float. Letters as in kernels/ops.h.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "kernels/buffer.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"
#include "worker/model/checkpoint.h"
#include "worker/model/model_config.h"

namespace millrace {

struct LayerWeights {
  Vec<float> attention_norm;  // [C]
  PackedWeight qkv;           // [(H + 2K) D, C]
  Vec<float> qkv_bias;        // [(H + 2K) D]; empty: none
  Vec<float> q_norm, k_norm;  // [D] each; empty: none
  PackedWeight output;        // [C, H D]
  Vec<float> mlp_norm;        // [C]
  PackedWeight gate_up;       // [2F, C]
  PackedWeight down;          // [C, F]
};

struct Weights {
  PackedWeight embedding;  // [V, C]
  std::vector<LayerWeights> layers;
  Vec<float> final_norm;  // [C]
  PackedWeight lm_head;   // [V, C]; the embedding itself where they are tied
  DeviceBuffer memory;
};

// Proves every tensor of the checkpoint before it takes memory. The checkpoint may be closed afterwards.
absl::StatusOr<Weights> LoadWeights(const ModelConfig& config, const Checkpoint& checkpoint, Stream& stream);

}  // namespace millrace
