#include "router/fleet/fleet.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "router/fleet/clock.h"
#include "service/log.h"

namespace millrace {

Fleet::Fleet(FleetOptions options) : options_(std::move(options)), scheduler_(options_.scheduler) {
  absl::MutexLock lock(&mutex_);
  for (const std::string& address : options_.addresses) AddMember(address, "");
}

Fleet::~Fleet() { Stop(); }

void Fleet::Start() {
  timer_ = std::thread([this] { RunTimer(); });
  if (options_.services.empty()) return;
  resolver_ = std::make_unique<Resolver>(
      options_.services, options_.resolve_period, options_.lookup,
      [this](const Address& service, const std::vector<std::string>& addresses) { OnResolved(service, addresses); });
}

void Fleet::Stop() {
  resolver_.reset();
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = timer_poked_ = true;
    for (auto& [id, member] : members_) {
      if (member.session != nullptr) member.session->End();
    }
  }
  if (timer_.joinable()) timer_.join();
  std::vector<std::unique_ptr<WorkerSession>> ended;  // deleted without the lock
  absl::flat_hash_map<SequenceId, Live> live;
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &Fleet::NoSessions));
  for (auto& [id, member] : members_) ended.push_back(std::move(member.ended));
  live.swap(live_);
}

bool Fleet::NoSessions() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const auto& entry) { return entry.second.session == nullptr; });
}

absl::StatusOr<std::vector<SequenceId>> Fleet::Submit(std::vector<SequenceSpec> specs,
                                                      std::shared_ptr<SequenceSink> sink) {
  Output output;
  std::vector<SequenceId> ids;
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return absl::UnavailableError("the router is shutting down");
    if (taken_over_) return TakenOver();
    absl::StatusOr<std::vector<SequenceId>> submitted = scheduler_.Submit(std::move(specs), MonotonicNow());
    if (!submitted.ok()) return submitted.status();
    ids = *std::move(submitted);
    for (size_t choice = 0; choice < ids.size(); ++choice) live_[ids[choice]] = Live{sink, static_cast<int>(choice)};
    output = TakeOutput();
  }
  Deliver(std::move(output));
  return ids;
}

std::optional<SequenceOutcome> Fleet::Cancel(SequenceId sequence) {
  SequenceOutcome outcome;
  Output output;
  std::shared_ptr<SequenceSink> sink;  // let go of without the lock
  {
    absl::MutexLock lock(&mutex_);
    const auto live = live_.find(sequence);
    if (live == live_.end()) return std::nullopt;
    outcome.report = scheduler_.Report(sequence);
    outcome.worker_id = WorkerName(outcome.report.worker);
    sink = std::move(live->second.sink);
    live_.erase(live);
    scheduler_.Cancel(sequence, MonotonicNow());
    output = TakeOutput();
  }
  Deliver(std::move(output));
  return outcome;
}

void Fleet::SetPaused(const std::vector<SequenceId>& sequences, bool paused) {
  Output output;
  {
    absl::MutexLock lock(&mutex_);
    const Time now = MonotonicNow();
    for (const SequenceId sequence : sequences) scheduler_.SetPaused(sequence, paused, now);
    output = TakeOutput();
  }
  Deliver(std::move(output));
}

Fleet::Output Fleet::TakeOutput() {
  Output output;
  for (const WorkerId worker : scheduler_.PendingWorkers()) {
    WorkerSession* const session = members_.at(member_of_.at(worker)).session.get();
    if (session->ClaimWrite()) output.edits.emplace_back(session, scheduler_.TakeEdit(worker));
  }
  for (SequenceEvent& event : scheduler_.TakeEvents()) {
    const auto live = live_.find(event.sequence);
    if (live == live_.end()) continue;
    const std::shared_ptr<SequenceSink>& sink = live->second.sink;
    SequenceUpdate update;
    update.choice = live->second.choice;
    if (event.finished) {
      SequenceOutcome& outcome = update.outcome.emplace();
      outcome.report = scheduler_.Report(event.sequence);
      outcome.worker_id = WorkerName(outcome.report.worker);
    }
    update.event = std::move(event);
    const bool finished = update.event.finished;
    sink->Push(std::move(update));
    if (output.sinks.empty() || output.sinks.back() != sink) output.sinks.push_back(sink);
    if (finished) live_.erase(live);
  }
  if (NextWake() < timer_due_) timer_poked_ = true;
  return output;
}

void Fleet::Deliver(Output output) {
  for (auto& [session, edit] : output.edits) session->Write(std::move(edit));
  for (const std::shared_ptr<SequenceSink>& sink : output.sinks) sink->Wake();
}

std::string Fleet::WorkerName(WorkerId worker) const {
  const auto found = member_of_.find(worker);
  return found == member_of_.end() ? std::string() : members_.at(found->second).ready.worker_id();
}

absl::Status Fleet::DrainWorker(const std::string& worker_id, Time budget) {
  absl::MutexLock lock(&mutex_);
  bool found = false;
  for (auto& [id, member] : members_) {
    if (member.ready.worker_id() != worker_id || worker_id.empty()) continue;
    found = true;
    Drain(member, budget, MonotonicNow());
  }
  if (!found)
    return absl::NotFoundError(absl::StrCat("worker_id is \"", worker_id.substr(0, 128), "\"; no such worker"));
  if (NextWake() < timer_due_) timer_poked_ = true;
  return absl::OkStatus();
}

SchedulerCounts Fleet::counts() const {
  absl::MutexLock lock(&mutex_);
  return scheduler_.counts();
}

std::vector<v1::WorkerStatus> Fleet::workers() const {
  absl::MutexLock lock(&mutex_);
  std::vector<v1::WorkerStatus> workers;
  const Time now = MonotonicNow();
  for (const auto& [id, member] : members_) {
    v1::WorkerStatus& status = workers.emplace_back();
    status.set_worker_id(member.ready.worker_id());
    status.set_instance_id(member.ready.instance_id());
    status.set_address(member.address);
    status.set_state(member.state);
    status.set_model(member.ready.model().name());
    status.set_last_error(member.last_error);
    status.set_faults(member.faults);
    const bool resting = member.session == nullptr && member.wake_at > now;
    status.set_retry_in_us(resting ? static_cast<uint64_t>(member.wake_at - now) : 0);
    if (!member.worker.has_value()) continue;
    const WorkerCounts counts = scheduler_.worker_counts(*member.worker);
    status.set_num_slots(counts.slots);
    status.set_used_slots(counts.used_slots);
    status.set_num_blocks(counts.blocks);
    status.set_free_blocks(counts.free_blocks);
    status.set_used_blocks(counts.used_blocks);
    status.set_cached_blocks(counts.cached_blocks);
    status.set_quarantined_blocks(counts.quarantined_blocks);
    status.set_steps(counts.steps);
    status.set_last_step_us(counts.last_step_us);
    status.set_drafted_tokens(counts.drafts.drafted);
    status.set_accepted_tokens(counts.drafts.accepted);
    status.set_draft_length(counts.draft_length);
  }
  return workers;
}

std::optional<worker::v1::Model> Fleet::model() const {
  absl::MutexLock lock(&mutex_);
  const worker::v1::Model* const model = scheduler_.model();
  return model == nullptr ? std::nullopt : std::optional(*model);
}

int64_t Fleet::max_sequence_tokens() const {
  absl::MutexLock lock(&mutex_);
  return max_sequence_tokens_;
}

uint32_t Fleet::num_ready_workers() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<uint32_t>(member_of_.size());
}

double Fleet::longest_prefill() const {
  absl::MutexLock lock(&mutex_);
  double longest = 0;
  for (const auto& [id, member] : members_) {
    if (member.worker.has_value()) longest = std::max(longest, scheduler_.WorkLeft(*member.worker).value_or(0));
  }
  return longest;
}

}  // namespace millrace
