// A decoder-only transformer (Llama, Qwen2, Qwen3): weights, tables and activations, taken at start-up, and the forward
// pass. Lives as long as the model; used by the engine thread. A is the type of activations and KV: float on the CPU,
// where the result is exact; bf16 is what a GPU computes. Memory: the weights, and per row 2 (2C + (H + 2K) D + H D +
// 3F) or so elements, per logit row V.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/buffer.h"
#include "kernels/ops.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"
#include "worker/model/checkpoint.h"
#include "worker/model/kv_cache.h"
#include "worker/model/model_config.h"
#include "worker/model/step.h"
#include "worker/model/weights.h"
#include "worker/parallel/communicator.h"

namespace millrace {

// The largest step.
struct StepLimits {
  int64_t rows = 0;        // T
  int64_t logit_rows = 0;  // R
  int64_t context = 0;     // tokens of one sequence
};

// What Forward reads of a step, on the stream's device.
struct ForwardInput {
  Vec<const int32_t> tokens, positions, kv_slots;  // [T] each
  AttentionBatch attention;
  Vec<const int32_t> logit_rows;  // [R]

  // The step where it lies: on the CPU the host's memory is the device's.
  static ForwardInput View(const StepInput& step);
};

template <class A>
class Transformer {
 public:
  static absl::StatusOr<Transformer> Load(const ModelConfig& config, const Checkpoint& checkpoint,
                                          const StepLimits& limits, Stream& stream);

  // The logits [R, V] of the step's logit rows, valid until the next call; k and v of all rows are in `kv`.
  Mat<const float> Forward(const ForwardInput& in, const KvCache<A>& kv, Stream& stream) {
    return ForwardFirst(config_.num_layers, in, kv, stream);
  }
  // The same of the first layers alone, as if there were no others.
  Mat<const float> ForwardFirst(int num_layers, const ForwardInput& in, const KvCache<A>& kv, Stream& stream);
  // The same, of the latest step.
  Mat<const float> logits(int64_t num_logit_rows) const { return activations_.logits.Rows(0, num_logit_rows); }

 private:
  struct Activations {
    Mat<float> residual, sum;       // [T, C] in turn
    Mat<A> hidden;                  // [T, C]
    Mat<float> delta;               // [T, C]
    Mat<A> qkv;                     // [T, (H + 2K) D]
    Mat<A> attention;               // [T, H D]
    Mat<A> gate_up;                 // [T, 2F]
    Mat<A> activated;               // [T, F]
    Mat<A> last;                    // [R, C]
    Mat<float> logits;              // [R, V]
    Mat<float> rope_cos, rope_sin;  // [positions, D / 2]
  };

  Transformer() = default;
  size_t Place(std::byte* memory, const StepLimits& limits);

  ModelConfig config_;
  Weights weights_;
  Activations activations_;
  DeviceBuffer memory_;  // of the activations
  Communicator communicator_;
};

}  // namespace millrace
