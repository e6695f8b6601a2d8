#include "router/api/router_metrics.h"

#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/string_view.h"
#include "service/log.h"

namespace millrace {
namespace {

using Labels = MetricPage::Labels;
using v1::WorkerStatus;

constexpr size_t kMaxListedWorkers = 64;

constexpr std::pair<WorkerStatus::State, absl::string_view> kStates[] = {
    {WorkerStatus::STATE_CONNECTING, "connecting"},
    {WorkerStatus::STATE_READY, "ready"},
    {WorkerStatus::STATE_DRAINING, "draining"},
    {WorkerStatus::STATE_LOST, "lost"},
};

double AsDouble(uint64_t value) { return static_cast<double>(value); }

void AddWorker(const WorkerStatus& worker, const std::string& name, MetricPage* page) {
  const Labels labels = {{"worker", name}};
  page->AddGauge("millrace_worker_ready", "1 while it takes sequences", worker.state() == WorkerStatus::STATE_READY,
                 labels);
  page->AddGauge("millrace_worker_draining", "1 while it drains", worker.state() == WorkerStatus::STATE_DRAINING,
                 labels);
  page->AddGauge("millrace_worker_slots", "sequences it can hold", worker.num_slots(), labels);
  page->AddGauge("millrace_worker_used_slots", "sequences it holds", worker.used_slots(), labels);
  const std::pair<const char*, uint32_t> blocks[] = {{"free", worker.free_blocks()},
                                                     {"used", worker.used_blocks()},
                                                     {"cached", worker.cached_blocks()},
                                                     {"quarantined", worker.quarantined_blocks()}};
  for (const auto& [state, count] : blocks) {
    page->AddGauge("millrace_worker_kv_blocks", "blocks of its pool", count, {{"worker", name}, {"state", state}});
  }
  page->AddCounter("millrace_worker_steps_total", "steps reported on the present stream", AsDouble(worker.steps()),
                   labels);
  page->AddGauge("millrace_worker_last_step_seconds", "duration of the latest step", worker.last_step_us() * 1e-6,
                 labels);
  page->AddGauge("millrace_draft_length", "tokens a decoding sequence drafts in a step, mean of those chosen",
                 worker.draft_length(), labels);
}

void AddDrafts(const DraftCounts& drafts, const std::string& model_name, MetricPage* page) {
  const Labels model = {{"model_name", model_name}};
  page->AddCounter("vllm:spec_decode_num_drafts_total", "steps of a sequence with any guess", AsDouble(drafts.drafts),
                   model);
  page->AddCounter("vllm:spec_decode_num_draft_tokens_total", "tokens guessed", AsDouble(drafts.drafted), model);
  page->AddCounter("vllm:spec_decode_num_accepted_tokens_total", "guesses that were right", AsDouble(drafts.accepted),
                   model);
  for (size_t position = 0; position < drafts.accepted_at.size(); ++position) {
    page->AddCounter("vllm:spec_decode_num_accepted_tokens_per_pos_total", "right guesses by position in their step",
                     AsDouble(drafts.accepted_at[position]),
                     {{"model_name", model_name}, {"position", std::to_string(position)}});
  }
}

}  // namespace

void AddWorkerMetrics(const std::vector<WorkerStatus>& workers, const std::string& model_name, MetricPage* page) {
  absl::flat_hash_map<std::string, int> uses;
  std::map<WorkerStatus::State, int> states;
  uint64_t blocks = 0, used = 0;
  for (const WorkerStatus& worker : workers) {
    ++uses[worker.worker_id()];
    ++states[worker.state()];
    blocks += worker.num_blocks();
    used += worker.used_blocks();
  }
  for (const auto& [state, name] : kStates) {
    page->AddGauge("millrace_workers", "members of the fleet by state", states[state], {{"state", std::string(name)}});
  }
  page->AddGauge("vllm:kv_cache_usage_perc", "blocks in running sequences' tables, of all",
                 blocks == 0 ? 0 : AsDouble(used) / AsDouble(blocks), {{"model_name", model_name}});
  for (size_t i = 0; i < workers.size() && i < kMaxListedWorkers; ++i) {
    const std::string& id = workers[i].worker_id();
    AddWorker(workers[i], id.empty() || uses[id] > 1 ? workers[i].address() : id, page);
  }
  page->AddGauge("millrace_workers_unlisted", "workers without series of their own",
                 workers.size() > kMaxListedWorkers ? AsDouble(workers.size() - kMaxListedWorkers) : 0);
}

RouterMetrics::RouterMetrics(const RouterOptions& options, std::string model_name, const RouterAccess* access,
                             const Fleet* fleet, const CallRegistry* registry, const RequestMetrics* requests,
                             const Readiness* readiness, const SpanExporter* spans)
    : options_(options),
      model_name_(std::move(model_name)),
      access_(access),
      fleet_(fleet),
      registry_(registry),
      requests_(requests),
      readiness_(readiness),
      spans_(spans) {}

void RouterMetrics::Fill(MetricPage* page) const {
  const Labels model = {{"model_name", model_name_}};
  const SchedulerCounts counts = fleet_->counts();
  page->AddGauge("vllm:num_requests_running", "sequences on workers", static_cast<double>(counts.running), model);
  page->AddGauge("vllm:num_requests_waiting", "sequences in the queue", static_cast<double>(counts.queued), model);
  page->AddCounter("vllm:prompt_tokens_total", "prompt tokens of accepted sequences", AsDouble(counts.prompt_tokens),
                   model);
  page->AddCounter("vllm:generation_tokens_total", "tokens that workers reported", AsDouble(counts.generated_tokens),
                   model);
  page->AddCounter("vllm:num_preemptions_total", "sequences put back into the queue for lack of blocks",
                   AsDouble(counts.preemptions), model);
  AddDrafts(counts.drafts, model_name_, page);
  page->AddGauge("millrace_paused_sequences", "of those running and waiting: their client does not read",
                 static_cast<double>(counts.paused));
  page->AddGauge("millrace_queue_tokens", "prompt tokens in the queue", static_cast<double>(counts.queued_tokens));
  page->AddGauge("millrace_queue_limit_sequences", "--max_queued_sequences",
                 static_cast<double>(options_.scheduler.max_queued_sequences));
  page->AddGauge("millrace_queue_limit_tokens", "--max_queued_tokens",
                 static_cast<double>(options_.scheduler.max_queued_tokens));
  page->AddGauge("millrace_open_calls", "Generate calls that are open", AsDouble(registry_->size()));
  page->AddGauge("millrace_calls_limit", "--max_calls", static_cast<double>(options_.max_calls));
  requests_->Collect(model_name_, page);
  access_->Fill(page);
  if (spans_ != nullptr) spans_->Fill(page);
  AddWorkerMetrics(fleet_->workers(), model_name_, page);
  page->AddGauge("millrace_ready", "1: readiness is SERVING", readiness_->ready());
  page->AddGauge("millrace_stuck", "1: work is pending and no step is made", readiness_->stuck());
  page->AddGauge("millrace_build_info", "always 1", 1, {{"component", "router"}, {"version", MILLRACE_VERSION}});
  page->AddGauge("millrace_router_epoch", "the router's epoch", AsDouble(options_.epoch));
  page->AddCounter("millrace_log_lines_dropped_total", "log lines left out by the rate limit",
                   AsDouble(LogLinesDropped()));
}

}  // namespace millrace
