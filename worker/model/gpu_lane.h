// A model on a GPU and the memory that its steps pass through: where the host stages them, where the device takes them
// over, and the graphs of steps of one row a sequence. The target has one, and so has a draft model. Lives as long as
// its runner; used by the engine thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/buffer.h"
#include "kernels/device_step.h"
#include "kernels/graph.h"
#include "worker/model/carver.h"
#include "worker/model/kv_cache.h"
#include "worker/model/transformer.h"

namespace millrace {

// The largest step.
struct GpuLaneLimits {
  int64_t rows = 0;
  int64_t sequences = 0;
  int64_t logit_rows = 0;
  int64_t biases = 0;
  int64_t context = 0;  // tokens of a sequence
};

class GpuLane {
 public:
  // The first `num_layers` of a transformer that outlives the lane.
  GpuLane(Transformer<bf16>* transformer, int num_layers, const GpuLaneLimits& limits)
      : transformer_(transformer), num_layers_(num_layers), limits_(limits) {}

  // `last_tokens` keeps what slots sample last, for all lanes alike.
  absl::Status TakeMemory(Vec<int32_t> last_tokens, Stream& stream);
  // Runs everything once and records it. The views outlive the lane. `counts_history`: sampled tokens are added to it.
  void RecordGraphs(const KvCache<bf16>* kv, Mat<TokenCount> history, bool counts_history, Stream& stream);

  // Gives a step to the stream. What it samples can be read at the place returned, [R], once the stream has come there,
  // until kStepTurns more steps have been launched. REQUIRES: at most kStepTurns are under way.
  Vec<const int32_t> Launch(const StepInput& input, Stream& stream);

  // Of the latest step, on the device.
  Mat<const float> logits(int64_t num_logit_rows) const { return transformer_->logits(num_logit_rows); }
  Vec<const int32_t> chosen(int64_t num_logit_rows) const { return {step_.chosen.data, num_logit_rows}; }

 private:
  struct DecodeGraph {
    int64_t sequences;
    Graph graph;
  };

  void PlaceOnDevice(Carver carver, Vec<int32_t> last_tokens, size_t* used);
  void PlaceShared(Carver carver, size_t* used);
  void Stage(const StepInput& input, StagedStep& to) const;
  void Compute(int64_t rows, int64_t sequences, int64_t logit_rows, Stream& stream);
  const DecodeGraph* GraphFor(const StepInput& input) const;

  Transformer<bf16>* const transformer_;
  const int num_layers_;
  const GpuLaneLimits limits_;
  const KvCache<bf16>* kv_ = nullptr;
  Mat<TokenCount> history_;  // [max_slots, V]
  bool counts_history_ = false;
  DeviceBuffer device_memory_, shared_memory_;
  DeviceStep step_;  // of the largest size
  StagedSteps staged_;
  uint64_t num_launched_ = 0;
  std::vector<DecodeGraph> graphs_;  // ascending; last: they hold the addresses of everything above
};

}  // namespace millrace
