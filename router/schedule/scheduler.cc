#include "router/schedule/scheduler.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "router/schedule/scheduler_state.h"

namespace millrace {

Scheduler::Scheduler(const SchedulerOptions& options) : state_(std::make_unique<State>(options)) {}
Scheduler::~Scheduler() = default;

void Scheduler::State::Detach(Sequence* sequence, Time now) {
  if (sequence->place == Sequence::Place::kQueued) {
    queue.Remove(sequence);
  } else if (sequence->place == Sequence::Place::kParked) {
    --num_parked;
  } else {
    for (Sequence* orphan : Change(sequence->worker).Stop(sequence->slot, false)) Return(orphan, now);
    --counts.running;
  }
}

void Scheduler::State::End(Sequence* sequence) {
  sequence->place = Sequence::Place::kEnded;
  if (sequence->due() != kNever) deadlines.erase({sequence->due(), sequence->id});
  counts.paused -= sequence->paused();
  if (sequence->tenant != nullptr) queue.Leave(sequence->tenant);
  sequence->tenant = nullptr;
  ended.push_back(sequence->id);
}

void Scheduler::State::Fail(Sequence* sequence, absl::Status status) {
  SequenceEvent& event = events.emplace_back();
  event.sequence = sequence->id;
  event.finished = true;
  event.status = std::move(status);
  End(sequence);
}

void Scheduler::State::ExpireDeadlines(Time now) {
  while (!deadlines.empty() && deadlines.begin()->first <= now) {
    Sequence* const sequence = sequences.at(deadlines.begin()->second).get();
    Detach(sequence, now);
    if (sequence->pause_ends <= now) {
      Fail(sequence, absl::ResourceExhaustedError(
                         absl::StrCat("its output was not taken for ", options.max_pause, " us; that is the limit")));
      continue;
    }
    Fail(sequence,
         absl::DeadlineExceededError(absl::StrCat("deadline passed ", now - sequence->deadline, " us ago, after ",
                                                  sequence->report.generated_tokens, " generated tokens")));
  }
}

void Scheduler::Cancel(SequenceId id, Time now) {
  const auto found = state_->sequences.find(id);
  if (found == state_->sequences.end() || found->second->cancelled) return;
  Sequence* const sequence = found->second.get();
  sequence->cancelled = state_->any_cancelled = true;
  if (sequence->place == Sequence::Place::kEnded) return;
  state_->Detach(sequence, now);
  state_->End(sequence);
  state_->Dispatch(now);
}

void Scheduler::Requeue(SequenceId id, Time now) {
  const auto found = state_->sequences.find(id);
  if (found == state_->sequences.end() || found->second->place != Sequence::Place::kRunning) return;
  Sequence* const sequence = found->second.get();
  RunningSet::Evicted evicted{{sequence}, state_->Change(sequence->worker).Stop(sequence->slot, false)};
  state_->Return(evicted, now);
  state_->Dispatch(now);
}

void Scheduler::Advance(Time now) { state_->Dispatch(now); }

Time Scheduler::NextDeadline() const { return state_->deadlines.empty() ? kNever : state_->deadlines.begin()->first; }

std::vector<SequenceEvent> Scheduler::TakeEvents() {
  for (const SequenceId id : state_->taken) state_->sequences.erase(id);
  state_->taken = std::move(state_->ended);
  state_->ended.clear();
  std::vector<SequenceEvent> events = std::move(state_->events);
  state_->events.clear();
  if (state_->any_cancelled) {
    std::erase_if(events, [&](const SequenceEvent& event) { return state_->sequences.at(event.sequence)->cancelled; });
    state_->any_cancelled = false;
  }
  return events;
}

SequenceReport Scheduler::Report(SequenceId sequence) const {
  const auto found = state_->sequences.find(sequence);
  MILLRACE_CHECK(found != state_->sequences.end(), "reports are asked for sequences that are still known",
                 static_cast<long long>(sequence));
  return found->second->report;
}

SchedulerCounts Scheduler::counts() const {
  SchedulerCounts counts = state_->counts;
  counts.queued = static_cast<int64_t>(state_->queue.size()) + state_->num_parked;
  counts.queued_tokens = state_->queue.tokens();
  return counts;
}

}  // namespace millrace
