// ModelRunner on a GPU: bf16 activations and KV, two steps under way, every step without a word from the host between
// its inputs and its tokens. A step of one row a sequence replays the graph recorded for the next larger number of
// sequences; any other is launched op by op. Both are the same ops on the same memory.
#pragma once

#include <memory>
#include <vector>

#include "kernels/buffer.h"
#include "kernels/device_step.h"
#include "kernels/graph.h"
#include "worker/model/carver.h"
#include "worker/model/checkpoint.h"
#include "worker/model/kv_cache.h"
#include "worker/model/model_runner.h"
#include "worker/model/transformer.h"

namespace millrace {

class GpuRunner final : public ModelRunner {
 public:
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Load(const ModelRunnerOptions& options, ModelConfig config,
                                                           const Checkpoint& checkpoint, Stream stream);
  ~GpuRunner() override;

  int64_t num_blocks() const override { return kv_.num_blocks(); }
  int max_steps_in_flight() const override { return kStepTurns; }
  bool guesses_with_penalties() const override { return false; }  // all rows of a step are sampled at once
  void Launch(const StepInput& input) override;
  void Await(StepOutput& output) override;
  void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) override;

 private:
  // What LogProbs writes and the host reads, in shared memory.
  struct StagedLogProbs {
    Vec<float> chosen;        // [R]
    Vec<float> top_values;    // [R, N]
    Vec<int32_t> top_tokens;  // [R, N]
  };
  // Of a step launched, by turn.
  struct Flight {
    std::vector<int32_t> num_logprobs;  // [R]
    int32_t most_logprobs = -1;         // N
    std::vector<int32_t> guesses;       // [R] the row's own token where that is a guess; else -1
  };
  struct DecodeGraph {
    int64_t sequences;
    Graph graph;
  };

  GpuRunner(const ModelRunnerOptions& options, ModelConfig config, Stream stream, Transformer<bf16> transformer);
  absl::Status TakeMemory();
  void PlaceOnDevice(Carver carver, size_t* used);
  void PlaceShared(Carver carver, size_t* used);
  void RecordGraphs();
  void Stage(const StepInput& input, StagedStep& to) const;
  Mat<const float> Compute(int64_t rows, int64_t sequences, int64_t logit_rows);
  const DecodeGraph* GraphFor(const StepInput& input) const;

  Stream stream_;  // first: what follows holds its memory
  Transformer<bf16> transformer_;
  KvCache<bf16> kv_;
  int64_t max_context_ = 0;
  DeviceBuffer device_memory_, shared_memory_;
  DeviceStep step_;          // of the largest size
  Mat<TokenCount> history_;  // [max_slots, V]
  StagedSteps staged_;
  StagedLogProbs logprobs_[kStepTurns];
  Flight flights_[kStepTurns];
  uint64_t launched_ = 0, awaited_ = 0;
  std::vector<DecodeGraph> graphs_;  // ascending; last: they hold the addresses of everything above
};

}  // namespace millrace
