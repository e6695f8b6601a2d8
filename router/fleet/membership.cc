// Workers come and go: what a Fleet does about its streams, and when.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "router/fleet/clock.h"
#include "router/fleet/fleet.h"
#include "router/fleet/ready.h"
#include "service/log.h"

namespace millrace {
namespace {

constexpr Time kMinBackoff = 50'000;
constexpr Time kMaxBackoff = 2'000'000;
constexpr Time kReadyTimeout = 10'000'000;

// Half of it up to all of it, so that routers and workers do not meet in step.
Time Jittered(Time backoff) {
  return backoff / 2 + static_cast<Time>(RandomBits() % static_cast<uint64_t>(backoff / 2 + 1));
}

}  // namespace

void Fleet::OnMessage(WorkerSession* session, worker::v1::WorkerMessage& message) {
  Output output;
  bool first = false;
  {
    absl::MutexLock lock(&mutex_);
    Member& member = members_[session->member()];
    const Time now = MonotonicNow();
    if (member.ended_by_us) {
      // Sent before it knew; the slots it speaks of are no longer its own.
    } else if (message.has_ready() && !member.worker.has_value()) {
      first = OnReady(member, message.ready(), now);
    } else if (message.has_report() && member.worker.has_value()) {
      const absl::Status status = scheduler_.Apply(*member.worker, message.report(), now);
      if (!status.ok()) Refuse(member, status, now);
    } else {
      Refuse(member, absl::InvalidArgumentError("expected one ready, then reports"), now);
    }
    output = TakeOutput();
  }
  session->ReadNext();
  Deliver(std::move(output));
  if (first && options_.on_first_ready) options_.on_first_ready();
}

// Whether it is the first worker of all.
bool Fleet::OnReady(Member& member, const worker::v1::Ready& ready, Time now) {
  const bool same = ready.worker_id() == member.ready.worker_id() && ready.instance_id() == member.ready.instance_id();
  absl::Status status = ValidateReady(ready, options_.tokenizer_vocab);
  if (status.ok()) {
    absl::StatusOr<WorkerId> worker = scheduler_.AddWorker(ready, now);
    if (worker.ok()) member.worker = *worker;
    status = worker.status();
  }
  if (!status.ok()) {
    Refuse(member, status, now);
    return false;
  }
  member.ready = ready;
  member.ready_at = now;
  member.state = v1::WorkerStatus::STATE_READY;
  member.last_error.clear();
  member.draining = member.draining && same;
  if (member.draining) {
    member.state = v1::WorkerStatus::STATE_DRAINING;
    scheduler_.DrainWorker(*member.worker);
  }
  member_of_[*member.worker] = static_cast<size_t>(&member - members_.data());
  max_sequence_tokens_ = std::min<int64_t>(ready.model().max_context(), scheduler_.max_sequence_tokens());
  SetWake(member, kNever);
  Log(LogLevel::kInfo, "worker_ready",
      {{"address", member.address},
       {"worker", ready.worker_id()},
       {"instance", ready.instance_id()},
       {"model", ready.model().name()},
       {"slots", ready.num_slots()},
       {"blocks", ready.num_blocks()}});
  const bool first = !any_ready_;
  any_ready_ = true;
  return first;
}

void Fleet::Refuse(Member& member, const absl::Status& why, Time now) {
  if (member.last_error != why.message()) {
    Log(LogLevel::kError, "worker_refused", {{"address", member.address}, {"error", std::string(why.message())}});
  }
  member.last_error = std::string(why.message());
  member.ended_by_us = true;
  Lose(member, now);
  member.state = v1::WorkerStatus::STATE_LOST;
  member.session->End();
}

void Fleet::Lose(Member& member, Time now) {
  if (!member.worker.has_value()) return;
  const WorkerId worker = *member.worker;
  member.worker.reset();
  member_of_.erase(worker);
  member.state = v1::WorkerStatus::STATE_LOST;
  scheduler_.RemoveWorker(worker, now);
  if (now - member.ready_at > kMaxBackoff) member.backoff = 0;
}

void Fleet::OnWritable(WorkerSession*) {
  Output output;
  {
    absl::MutexLock lock(&mutex_);
    output = TakeOutput();
  }
  Deliver(std::move(output));
}

void Fleet::OnEnd(WorkerSession* session, const grpc::Status& status) {
  Output output;
  {
    absl::MutexLock lock(&mutex_);
    Member& member = members_[session->member()];
    const Time now = MonotonicNow();
    const std::string error =
        absl::StrCat("stream ended with code ", static_cast<int>(status.error_code()), ": ", status.error_message());
    if (!member.ended_by_us && !stopping_) {
      if (member.worker.has_value() || member.last_error != error) {
        Log(LogLevel::kWarning, member.worker.has_value() ? "worker_lost" : "worker_unreachable",
            {{"address", member.address}, {"error", error}});
      }
      member.last_error = error;
    }
    Lose(member, now);
    member.ended = std::move(member.session);
    member.ended_by_us = false;
    member.backoff = std::clamp(member.backoff * 2, kMinBackoff, kMaxBackoff);
    SetWake(member, now + Jittered(member.backoff));
    output = TakeOutput();
  }
  Deliver(std::move(output));
}

void Fleet::SetWake(Member& member, Time when) {
  member.wake_at = when;
  members_due_ = std::min(members_due_, when);
}

Time Fleet::NextWake() const { return std::min(members_due_, scheduler_.NextDeadline()); }

std::vector<WorkerSession*> Fleet::WakeMembers(Time now, std::vector<std::unique_ptr<WorkerSession>>* ended) {
  std::vector<WorkerSession*> fresh;
  members_due_ = kNever;
  for (size_t index = 0; index < members_.size(); ++index) {
    Member& member = members_[index];
    if (member.wake_at <= now && member.session == nullptr) {
      worker::v1::Hello hello;
      hello.set_router_id(options_.router_id);
      hello.set_epoch(options_.epoch);
      ended->push_back(std::move(member.ended));
      member.session.reset(
          new WorkerSession(this, index, member.address, std::move(hello)));  // its listener is a private base
      member.wake_at = now + kReadyTimeout;
      fresh.push_back(member.session.get());
    } else if (member.wake_at <= now) {
      Refuse(member, absl::DeadlineExceededError(absl::StrCat("no ready within ", kReadyTimeout / 1'000'000, " s")),
             now);
      member.wake_at = kNever;
    }
    members_due_ = std::min(members_due_, member.wake_at);
  }
  return fresh;
}

void Fleet::RunTimer() {
  mutex_.Lock();
  while (!stopping_) {
    timer_due_ = NextWake();
    timer_poked_ = false;
    const Time wait = timer_due_ == kNever ? kNever : timer_due_ - MonotonicNow();
    const absl::Duration timeout = wait == kNever ? absl::InfiniteDuration() : absl::Microseconds(wait);
    mutex_.AwaitWithTimeout(absl::Condition(&timer_poked_), timeout);
    if (stopping_) break;
    const Time now = MonotonicNow();
    std::vector<WorkerSession*> fresh;
    std::vector<std::unique_ptr<WorkerSession>> ended;
    if (members_due_ <= now) fresh = WakeMembers(now, &ended);
    if (scheduler_.NextDeadline() <= now) scheduler_.Advance(now);
    timer_due_ = 0;  // no poke: this thread looks again by itself
    Output output = TakeOutput();
    mutex_.Unlock();
    for (WorkerSession* session : fresh) session->Start();
    Deliver(std::move(output));
    ended.clear();
    mutex_.Lock();
  }
  mutex_.Unlock();
}

}  // namespace millrace
