#include "worker/api/worker_metrics.h"

#include <string>
#include <utility>

#include "service/log.h"

namespace millrace {
namespace {

constexpr double kStepBounds[] = {.0002, .0005, .001, .002, .003, .005, .0075, .01, .015, .02, .03,
                                  .045,  .06,   .08,  .1,   .15,  .25,  .5,    1,   2.5,  5,   10};
constexpr double kTokenBounds[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
constexpr double kRowBounds[] = {0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};

int64_t LongestStep(const EngineOptions& options) {
  const double rows = options.limits.max_rows, context = options.limits.max_context;
  return static_cast<int64_t>(
      options.step_cost.step_us() +
      rows * (options.step_cost.prefill_token_us() + context * options.step_cost.prefill_context_ns() * 1e-3));
}

void Add(std::atomic<uint64_t>& counter, int64_t value) {
  counter.fetch_add(static_cast<uint64_t>(value), std::memory_order_relaxed);
}

double Value(const std::atomic<uint64_t>& counter) {
  return static_cast<double>(counter.load(std::memory_order_relaxed));
}

}  // namespace

WorkerMetrics::WorkerMetrics(const EngineOptions& options)
    : longest_step_us_(LongestStep(options)),
      step_time_(kStepBounds, 1e-6),
      step_tokens_(kTokenBounds, 1),
      decode_rows_(kRowBounds, 1) {}

void WorkerMetrics::OnStream(bool connected) {
  connected_.store(connected, std::memory_order_relaxed);
  if (connected) Add(streams_, 1);
}

void WorkerMetrics::OnEdit(const worker::v1::Edit& edit) {
  Add(edits_, 1);
  Add(admissions_, edit.admit_size());
  Add(releases_, edit.release_size());
}

void WorkerMetrics::OnReport(const worker::v1::StepReport& report) {
  if (report.step_us() == 0) return;  // a heartbeat
  int64_t tokens = 0;
  for (const worker::v1::Row& row : report.rows()) {
    tokens += row.token_ids_size();
    if (row.finish_reason() != worker::v1::FINISH_REASON_UNSPECIFIED) {
      Add(finished_[static_cast<size_t>(row.finish_reason())], 1);
    }
  }
  Add(generated_tokens_, tokens);
  Add(prefill_tokens_, report.prefill_tokens());
  Add(stalls_, report.stalled_slots_size());
  step_time_.Observe(report.step_us());
  step_tokens_.Observe(int64_t{report.decode_rows()} + report.prefill_tokens());
  decode_rows_.Observe(report.decode_rows());
  const int64_t usual = usual_step_us_.load(std::memory_order_relaxed);
  usual_step_us_.store(usual + (report.step_us() - usual) / 8, std::memory_order_relaxed);
  Add(steps_, 1);
}

Progress WorkerMetrics::SampleProgress(const Engine& engine) const {
  Progress progress;
  progress.pending = engine.busy();
  progress.steps = steps_.load(std::memory_order_relaxed);
  progress.usual_step_us = usual_step_us_.load(std::memory_order_relaxed);
  progress.longest_step_us = longest_step_us_;
  return progress;
}

void WorkerMetrics::FillCounters(MetricPage* page) const {
  page->AddCounter("millrace_engine_steps_total", "steps", Value(steps_));
  page->AddHistogram("millrace_engine_step_seconds", "duration of a step", step_time_);
  page->AddHistogram("millrace_engine_decode_rows", "decoding rows of a step", decode_rows_);
  page->AddCounter("millrace_engine_prefill_tokens_total", "prompt tokens computed", Value(prefill_tokens_));
  page->AddCounter("millrace_engine_generated_tokens_total", "tokens sampled", Value(generated_tokens_));
  page->AddCounter("millrace_engine_stalls_total", "decoding slots that waited for a block, over all steps",
                   Value(stalls_));
  page->AddCounter("millrace_engine_admissions_total", "sequences that the router placed here", Value(admissions_));
  page->AddCounter("millrace_engine_released_total", "slots that the router stopped", Value(releases_));
  page->AddCounter("millrace_engine_edits_total", "edits received", Value(edits_));
  page->AddCounter("millrace_engine_streams_total", "router streams that took the engine over", Value(streams_));
  const std::pair<worker::v1::FinishReason, const char*> reasons[] = {
      {worker::v1::FINISH_REASON_STOP_TOKEN, "stop"},
      {worker::v1::FINISH_REASON_LENGTH, "length"},
      {worker::v1::FINISH_REASON_NON_FINITE, "non_finite"}};
  for (const auto& [reason, name] : reasons) {
    page->AddCounter("millrace_engine_finished_total", "sequences that ended by themselves",
                     Value(finished_[static_cast<size_t>(reason)]), {{"reason", name}});
  }
  page->AddCounter("millrace_log_lines_dropped_total", "log lines left out by the rate limit",
                   static_cast<double>(LogLinesDropped()));
}

void WorkerMetrics::Fill(const worker::v1::Ready& ready, const Engine& engine, const Readiness& readiness,
                         MetricPage* page) const {
  const std::string& model = ready.model().name();
  page->AddGauge("vllm:cache_config_info", "always 1", 1,
                 {{"model_name", model},
                  {"block_size", std::to_string(ready.block_tokens())},
                  {"num_gpu_blocks", std::to_string(ready.num_blocks())}});
  page->AddHistogram("vllm:iteration_tokens_total", "tokens computed by a step", step_tokens_, {{"model_name", model}});
  FillCounters(page);
  page->AddGauge("millrace_engine_active_slots", "sequences that it holds", engine.num_active());
  page->AddGauge("millrace_engine_slots", "sequences that it can hold", ready.num_slots());
  page->AddGauge("millrace_engine_router_connected", "1: a router's stream is attached",
                 connected_.load(std::memory_order_relaxed));
  page->AddGauge("millrace_engine_progress_age_seconds", "since the last step, while slots are active",
                 static_cast<double>(readiness.waited_us()) * 1e-6);
  page->AddGauge("millrace_ready", "1: readiness is SERVING", readiness.ready());
  page->AddGauge("millrace_stuck", "1: work is pending and no step is made", readiness.stuck());
  page->AddGauge("millrace_build_info", "always 1", 1, {{"component", "worker"}, {"version", MILLRACE_VERSION}});
}

}  // namespace millrace
