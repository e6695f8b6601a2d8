// ModelRunner on a GPU: bf16 activations and KV, two steps under way, every step without a word from the host between
// its inputs and its tokens, drafts included. A step of one row a sequence replays the graph recorded for the next
// larger number of sequences; any other is launched op by op. Both are the same ops on the same memory.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/buffer.h"
#include "worker/model/carver.h"
#include "worker/model/checkpoint.h"
#include "worker/model/gpu_lane.h"
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
  int max_steps_in_flight() const override { return kMaxFlights; }
  bool guesses_with_penalties() const override { return false; }  // all rows of a step are sampled at once
  void Launch(const StepInput& input) override;
  void Await(StepOutput& output) override;
  void ResetHistory(int slot, Vec<const int32_t> prompt, Vec<const int32_t> output) override;

 private:
  static constexpr int kMaxFlights = 2, kDraftMark = kMaxFlights;

  // What LogProbs writes and the host reads, in shared memory.
  struct StagedLogProbs {
    Vec<float> chosen;        // [R]
    Vec<float> top_values;    // [R, N]
    Vec<int32_t> top_tokens;  // [R, N]
  };
  struct Guess {
    size_t logit_row = 0;
    int32_t token = 0;
    const int32_t* drafted = nullptr;  // where it is once the step has ended, if the draft model made it
  };
  // Of a step launched.
  struct Flight {
    Vec<const int32_t> chosen;          // [R] once it has ended
    std::vector<int32_t> num_logprobs;  // [R]
    int32_t most_logprobs = -1;         // N
    std::vector<Guess> guesses;         // rows whose own token is one, ascending
    bool drafts = false;
    std::chrono::steady_clock::time_point launched;
  };

  GpuRunner(const ModelRunnerOptions& options, ModelConfig config, Stream stream, Transformer<bf16> transformer);
  GpuLaneLimits LaneLimits() const;
  absl::Status LoadDraft(const StepLimits& limits);
  absl::Status TakeMemory();
  absl::Status TakePool(int64_t free_before);
  void PlaceOnDevice(Carver carver, size_t* used);
  void PlaceShared(Carver carver, size_t* used);
  void RecordGraphs();
  void LaunchDrafts(const StepInput& input);

  Stream stream_;  // first: what follows holds its memory
  Transformer<bf16> transformer_;
  std::optional<Transformer<bf16>> draft_transformer_;
  std::optional<ModelConfig> draft_config_;
  KvCache<bf16> kv_, draft_kv_;
  int64_t max_context_ = 0;
  DeviceBuffer device_memory_, shared_memory_;
  Vec<int32_t> last_tokens_;  // [1 + kMaxDrafts, max_slots]
  Mat<TokenCount> history_;   // [max_slots, V]
  StagedLogProbs logprobs_[kMaxFlights];
  Flight flights_[kMaxFlights];
  uint64_t launched_ = 0, awaited_ = 0;
  StepInput step_input_, draft_input_;  // of a step with drafts, and of a pass
  std::vector<int32_t> guess_rows_;
  std::vector<const int32_t*> drafted_;  // by row of the step
  GpuLane target_;                       // last: their graphs hold the addresses of everything above
  std::optional<GpuLane> draft_;
};

}  // namespace millrace
