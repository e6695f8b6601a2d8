// The router's core and workers' engines in one process, without gRPC: what the wire carries is handed over directly.
// The test's thread plays the router; each engine has its own. Virtual time, a millisecond per report, or the clock's
// where a worker's costs are measured.
#pragma once

#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "router/schedule/scheduler.h"
#include "worker/engine/engine.h"
#include "worker/model/model_runner.h"

namespace millrace {

struct WorkerShape {
  int num_slots = 64;
  int max_rows = 512;
  int64_t num_blocks = 4096;
  double step_target_us = 45'000;
  std::filesystem::path draft_model = {};
  int draft_layers = 0;
  bool measured = false;  // its costs, instead of given ones
};

struct Output {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  absl::Status status;
  SequenceReport report;
};

class InProcessCluster {
 public:
  explicit InProcessCluster(const std::filesystem::path& model_dir, int lease_tokens_ahead = 64,
                            bool speculation = true)
      : model_dir_(model_dir),
        options_(Options(lease_tokens_ahead, speculation)),
        scheduler_(std::make_unique<Scheduler>(options_)) {}

  void AddWorker(const WorkerShape& shape);
  // As if its stream broke: its engine's slots are released, later reports are dropped.
  void LoseWorker(size_t index);

  // Changes every edit before it goes to a worker.
  void SetEditor(std::function<void(worker::v1::Edit*)> editor) { editor_ = std::move(editor); }

  // Another core, with another key, takes the workers over with what they have kept. Nothing may be running.
  void RestartRouter();

  // Submits spec groups one by one, the next after `reports_between` more reports, and plays until all have ended.
  // `on_report`, if given, is called with the number of reports so far.
  std::vector<Output> Run(std::vector<std::vector<SequenceSpec>> groups, int reports_between,
                          const std::function<void(int)>& on_report = nullptr);

  // Tokens that workers drafted so far, and those of them that came.
  int64_t num_drafted() const { return num_drafted_; }
  int64_t num_right() const { return num_right_; }

  Scheduler& scheduler() { return *scheduler_; }
  WorkerId worker_id(size_t index) const { return workers_[index].id; }

 private:
  struct Mailbox {
    absl::Mutex mutex;
    std::deque<std::pair<const ReportSink*, worker::v1::StepReport>> reports ABSL_GUARDED_BY(mutex);
    bool HasReport() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return !reports.empty(); }
  };
  class Sink;
  struct Worker {
    WorkerId id = 0;
    std::unique_ptr<Engine> engine;
    worker::v1::Ready ready;
    std::shared_ptr<Sink> sink;  // null: lost
  };

  static SchedulerOptions Options(int lease_tokens_ahead, bool speculation);
  void PassTime();
  void PostEdits();

  std::filesystem::path model_dir_;
  SchedulerOptions options_;
  std::unique_ptr<Scheduler> scheduler_;
  Mailbox mailbox_;
  std::vector<Worker> workers_;  // after the mailbox: their threads write to it
  Time now_ = 0;
  bool measured_ = false;
  int64_t num_drafted_ = 0, num_right_ = 0;
  std::function<void(worker::v1::Edit*)> editor_;
};

}  // namespace millrace
