// The engine: one thread that owns the running set and the model, plays what it was told, and reports every step. Lives
// from start-up to shutdown. Thread-safe: Attach, Detach and Post are called by RPC threads and never wait for a step;
// everything else happens on the engine's own thread, which never waits for a reader.
//
// Growth: the mailbox holds at most kMaxPendingEdits edits and kMaxPendingBytes; slots and blocks are fixed by the
// limits.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "millrace/worker/v1/worker.pb.h"
#include "worker/engine/block_labels.h"
#include "worker/engine/draft_table.h"
#include "worker/engine/engine_limits.h"
#include "worker/engine/slot_table.h"
#include "worker/engine/step_packer.h"
#include "worker/model/model.h"

namespace millrace {

// One stream's end in the engine. Called on the engine thread; must not block. There is no report without news.
class ReportSink {
 public:
  virtual ~ReportSink() = default;
  // The stream has the engine: what the blocks hold from before. Reports follow.
  virtual void OnBegin(std::vector<worker::v1::CachedBlocks> /*cached*/) {}
  virtual void OnReport(worker::v1::StepReport report) = 0;
  // The stream broke the contract: it is detached, its slots are released, nothing follows.
  virtual void OnError(absl::Status status) = 0;
};

struct EngineOptions {
  EngineLimits limits;
  worker::v1::StepCost step_cost;
  double step_target_us = 45'000;
  std::shared_ptr<const DraftTable> draft_table;  // may be null
};

class Engine {
 public:
  static constexpr size_t kMaxPendingEdits = 4096;
  static constexpr size_t kMaxPendingBytes = 256 << 20;

  Engine(std::unique_ptr<Model> model, const EngineOptions& options);
  // Finishes the running step and reports nothing more.
  ~Engine();

  const EngineOptions& options() const { return options_; }
  // Any thread. Slots that are held; whether there is something to compute, which slots without room are not.
  int num_active() const { return num_active_.load(std::memory_order_relaxed); }
  bool busy() const { return busy_.load(std::memory_order_relaxed); }

  // A new stream takes over an empty running set; whatever was attached before is silently detached.
  // Owners of the sink: the RPC that it belongs to, and the engine as long as it may still report to it.
  void Attach(std::shared_ptr<ReportSink> sink);
  // Releases every slot, if the sink is the attached one.
  void Detach(const ReportSink* sink);
  // Hands over an edit to be applied before the next step. Ignored unless the sink is the attached one.
  // INVALID_ARGUMENT if it can be told at once, RESOURCE_EXHAUSTED if the mailbox is full; the stream is to end then.
  absl::Status Post(const ReportSink* sink, worker::v1::Edit edit);
  // Waits until nothing is attached, or every slot is empty and no edit waits. False if that took too long.
  bool AwaitEmpty(absl::Duration patience);

 private:
  struct Mail {
    std::shared_ptr<ReportSink> sink;
    uint64_t stream = 0;
    std::vector<worker::v1::Edit> edits;
    bool stop = false;
  };

  void Loop();
  Mail TakeMail(bool idle);
  bool HasMail() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsEmpty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BeginStream(const Mail& mail);
  absl::Status Apply(const worker::v1::Edit& edit);
  void ResetHistory(const worker::v1::Admit& admit);
  // Launches a step, or takes the results of one, or both. Returns whether there is nothing to compute until mail
  // comes.
  bool Step();
  void Launch(StepPlan plan);
  void TakeResults();
  // Before a step is packed: every token of the slots that draft, and the guesses that are looked up.
  void PrepareGuesses();
  void LabelBlocks(const StepPlan& plan);
  void ReleaseEnded(const worker::v1::StepReport& report);
  void DropSteps();
  void ReportIfNews(const StepPlan& plan);
  void Report(worker::v1::StepReport report);
  void Fail(const absl::Status& status);

  const EngineOptions options_;

  mutable absl::Mutex mutex_;
  std::shared_ptr<ReportSink> sink_ ABSL_GUARDED_BY(mutex_);
  uint64_t stream_ ABSL_GUARDED_BY(mutex_) = 0;  // counts Attach and Detach
  std::vector<worker::v1::Edit> edits_ ABSL_GUARDED_BY(mutex_);
  size_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool empty_ ABSL_GUARDED_BY(mutex_) = true;  // every slot, when mail was last taken
  uint64_t taken_stream_ ABSL_GUARDED_BY(mutex_) = 0;

  std::atomic<int> num_active_{0};  // as of the latest edit or step
  std::atomic<bool> busy_{false};

  // The engine thread's own.
  std::unique_ptr<Model> model_;
  SlotTable table_;
  BlockLabels labels_;
  // Steps launched whose results are not taken yet, oldest first; the others are spare.
  struct FlyingStep {
    StepPlan plan;
    StepInput input;
    worker::v1::StepReport report;
    std::chrono::steady_clock::time_point launched;
  };
  std::vector<FlyingStep> flying_;
  size_t num_flying_ = 0;
  StepOutput output_;
  std::chrono::steady_clock::time_point last_end_;  // of a step
  std::shared_ptr<ReportSink> serving_;
  uint64_t serving_stream_ = 0;
  uint64_t steps_ = 0;         // of this stream
  uint64_t applied_edit_ = 0;  // of this stream
  uint64_t reported_edit_ = 0;
  std::vector<int32_t> reported_stalls_;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace millrace
