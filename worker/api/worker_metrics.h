// What is counted about a worker: edits as they come, steps as they are reported, each by atomic additions and never
// under a lock. OnReport is called by the engine's thread, OnEdit by gRPC's, Fill by the metrics server's. Lives as
// long as the worker. Series: about 100.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "millrace/worker/v1/worker.pb.h"
#include "service/histogram.h"
#include "service/metric_page.h"
#include "service/progress_watch.h"
#include "service/readiness.h"
#include "worker/engine/engine.h"

namespace millrace {

class WorkerMetrics {
 public:
  explicit WorkerMetrics(const EngineOptions& options);

  void OnStream(bool connected);  // a router's: it takes over, or is gone
  void OnEdit(const worker::v1::Edit& edit);
  void OnReport(const worker::v1::StepReport& report);

  // For readiness.
  Progress SampleProgress(const Engine& engine) const;

  void Fill(const worker::v1::Ready& ready, const Engine& engine, const Readiness& readiness, MetricPage* page) const;

 private:
  void FillCounters(MetricPage* page) const;

  const int64_t longest_step_us_;  // predicted: all rows prefill at the end of the context
  Histogram step_time_, step_tokens_, decode_rows_;
  std::atomic<uint64_t> steps_{0}, prefill_tokens_{0}, generated_tokens_{0}, stalls_{0};
  std::atomic<uint64_t> admissions_{0}, releases_{0}, edits_{0}, streams_{0};
  std::array<std::atomic<uint64_t>, worker::v1::FinishReason_ARRAYSIZE> finished_{};
  std::atomic<bool> connected_{false};
  std::atomic<int64_t> usual_step_us_{0};
};

}  // namespace millrace
