#include "tests/cluster/sim/virtual_cluster.h"

#include <utility>

#include "kernels/check.h"

namespace millrace {

void VirtualCluster::At(Time when, std::function<void()> what) {
  events_.push({std::max(when, now_), next_serial_++, std::move(what)});
}

size_t VirtualCluster::Join(const worker::v1::Ready& ready, const worker::v1::StepCost& real,
                            const Drafting& drafting) {
  const absl::StatusOr<WorkerId> id = scheduler_.AddWorker(ready, now_);
  MILLRACE_CHECK(id.ok(), "the scheduler takes the worker");
  const size_t member = members_.size();
  members_.push_back(std::make_unique<Member>(ready, real, &ends_, drafting));
  members_.back()->id = *id;
  places_[*id] = member;
  Pump();
  return member;
}

void VirtualCluster::Lose(size_t member) {
  members_[member]->lost = true;
  places_.erase(members_[member]->id);
  scheduler_.RemoveWorker(members_[member]->id, now_);
  Pump();
}

size_t VirtualCluster::Arrive(Time when, VirtualRequest request) {
  const size_t index = requests_.size();
  request.arrived = when;
  ends_.push_back(static_cast<uint32_t>(request.prompt.size()) + request.output);
  requests_.push_back(std::move(request));
  At(when, [this, index] { Submit(index); });
  return index;
}

void VirtualCluster::Submit(size_t index) {
  VirtualRequest& request = requests_[index];
  SequenceSpec spec;
  spec.prompt = std::move(request.prompt);
  spec.max_tokens = static_cast<int32_t>(request.output + 64);  // it does not tell
  spec.sampling.set_repetition_penalty(1);
  spec.sampling.set_seed(index);
  spec.tenant = request.tenant;
  if (request.patience != kNever) spec.deadline = now_ + request.patience;
  std::vector<SequenceSpec> specs;
  specs.push_back(std::move(spec));
  const absl::StatusOr<std::vector<SequenceId>> ids = scheduler_.Submit(std::move(specs), now_);
  if (ids.ok()) {
    by_sequence_[ids->front()] = index;
  } else {
    request.status = ids.status();
    request.ended = now_;
  }
  Pump();
}

void VirtualCluster::Pump() {
  for (const WorkerId id : scheduler_.PendingWorkers()) {
    const size_t member = places_.at(id);
    if (std::exchange(members_[member]->edit_in_flight, true)) continue;
    worker::v1::Edit edit = scheduler_.TakeEdit(id);
    const std::string bytes = edit.SerializeAsString() + std::to_string(member) + std::to_string(now_);
    for (const char byte : bytes) digest_ = (digest_ ^ static_cast<unsigned char>(byte)) * 1099511628211u;
    At(now_ + wire_, [this, member, edit = std::move(edit)] { Deliver(member, edit); });
  }
  for (const SequenceEvent& event : scheduler_.TakeEvents()) {
    const auto found = by_sequence_.find(event.sequence);
    MILLRACE_CHECK(found != by_sequence_.end(), "events are about sequences that live");
    VirtualRequest& request = requests_[found->second];
    if (!event.token_ids.empty() && request.first == 0) request.first = now_;
    request.received += static_cast<uint32_t>(event.token_ids.size());
    if (!event.finished) continue;
    request.cached = static_cast<uint32_t>(scheduler_.Report(event.sequence).cached_tokens);
    request.admitted = scheduler_.Report(event.sequence).admitted != 0;
    request.ended = now_;
    request.status = event.status;
    by_sequence_.erase(found);
  }
  const Time next = scheduler_.NextDeadline();
  if (next >= next_advance_) return;
  next_advance_ = next;
  At(next, [this] {
    next_advance_ = kNever;
    scheduler_.Advance(now_);
    Pump();
  });
}

void VirtualCluster::Deliver(size_t index, const worker::v1::Edit& edit) {
  Member& member = *members_[index];
  if (member.lost) return;
  member.edit_in_flight = false;
  member.worker.Apply(edit);
  if (member.worker.idle()) {
    BeginStep(index);
    if (member.worker.idle() && edit.release_size() > 0) Send(index, member.worker.Heartbeat());
  }
  Pump();
}

void VirtualCluster::BeginStep(size_t index) {
  const Time duration = members_[index]->worker.Begin();
  if (duration == 0) return;
  At(now_ + duration, [this, index] {
    if (members_[index]->lost) return;
    ++num_steps_;
    Send(index, members_[index]->worker.End());
    BeginStep(index);
  });
}

void VirtualCluster::Send(size_t index, worker::v1::StepReport report) {
  At(now_ + wire_, [this, index, report = std::move(report)] {
    Member& member = *members_[index];
    if (member.lost) return;
    member.computed_tokens += report.prefill_tokens();
    const absl::Status status = scheduler_.Apply(member.id, report, now_);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
    MILLRACE_CHECK(status.ok(), "the scheduler accepts a worker's reports", static_cast<long long>(index));
    Pump();
  });
}

void VirtualCluster::Run(Time until) {
  while (!events_.empty() && events_.top().at <= until) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.at;
    event.what();
  }
}

}  // namespace millrace
