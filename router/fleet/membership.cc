// Workers come and go: what a Fleet does about its streams, and when.
#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "router/fleet/clock.h"
#include "router/fleet/fleet.h"
#include "router/fleet/ready.h"
#include "service/log.h"

namespace millrace {
namespace {

constexpr Time kMinBackoff = 50'000;
constexpr Time kMaxBackoff = 800'000;  // a worker that is back gets work within a second
constexpr Time kReadyTimeout = 10'000'000;
constexpr size_t kMaxMembers = 1024;
// The breaker: a worker that is lost by a fault so soon, for the third time in sequence, rests before it is tried
// again, twice as long each time.
constexpr Time kShortLife = 5'000'000;
constexpr uint32_t kShortLives = 3;
constexpr Time kFirstRest = 1'000'000;
constexpr Time kLongestRest = 30'000'000;

// Ends of a stream that say nothing against the worker: it left, another router has it, or this one was too slow.
bool InOrder(grpc::StatusCode code) {
  return code == grpc::StatusCode::OK || code == grpc::StatusCode::ABORTED ||
         code == grpc::StatusCode::FAILED_PRECONDITION || code == grpc::StatusCode::RESOURCE_EXHAUSTED;
}

// Half of it up to all of it, so that routers and workers do not meet in step.
Time Jittered(Time backoff) {
  return backoff / 2 + static_cast<Time>(RandomBits() % static_cast<uint64_t>(backoff / 2 + 1));
}

}  // namespace

void Fleet::AddMember(const std::string& address, const std::string& service) {
  Member& member = members_[next_member_++];
  member.address = address;
  member.service = service;
  members_due_ = 0;
}

// A service's name stands for whatever addresses it has now. One that it no longer has is not connected again; a worker
// may outlive its address there, as pods do that end in order.
void Fleet::OnResolved(const Address& service, const std::vector<std::string>& addresses) {
  const std::string name = service.ToString();
  absl::MutexLock lock(&mutex_);
  absl::flat_hash_set<absl::string_view> missing(addresses.begin(), addresses.end());
  for (auto& [id, member] : members_) {
    const bool found = missing.erase(member.address) > 0;
    if (member.service != name) continue;
    member.listed = found;
    if (!found && member.session != nullptr && !member.worker.has_value()) member.session->End();
  }
  for (const absl::string_view address : missing) {
    if (members_.size() < kMaxMembers) {
      AddMember(std::string(address), name);
    } else {
      Log(LogLevel::kError, "too_many_workers", {{"address", address}, {"limit", kMaxMembers}});
    }
  }
  members_due_ = 0;
  timer_poked_ = true;
}

void Fleet::OnMessage(WorkerSession* session, worker::v1::WorkerMessage& message) {
  Output output;
  bool first = false;
  {
    absl::MutexLock lock(&mutex_);
    Member& member = members_.at(session->member());
    const Time now = MonotonicNow();
    if (member.ended_by_us) {
      // Sent before it knew; the slots it speaks of are no longer its own.
    } else if (message.has_cached() && !member.worker.has_value()) {
      const absl::Status status = OnCached(member, *message.mutable_cached());
      if (!status.ok()) Refuse(member, status, now);
    } else if (message.has_ready() && !member.worker.has_value()) {
      first = OnReady(session->member(), message.ready(), now);
    } else if (message.has_goodbye() && member.worker.has_value()) {
      member.leaving = true;
      Drain(member, Time{message.goodbye().budget_ms()} * 1000, now);
    } else if (message.has_report() && member.worker.has_value()) {
      member.liveness->Heard(now, message.report().step(), message.report().step_us());
      const absl::Status status = scheduler_.Apply(*member.worker, message.report(), now);
      if (!status.ok()) Refuse(member, status, now);
    } else {
      Refuse(member, absl::InvalidArgumentError("expected one ready, then reports and a goodbye"), now);
    }
    output = TakeOutput();
  }
  session->ReadNext();
  Deliver(std::move(output));
  if (first && options_.on_first_ready) options_.on_first_ready();
}

// Whether it is the first worker of all.
bool Fleet::OnReady(size_t id, const worker::v1::Ready& ready, Time now) {
  Member& member = members_.at(id);
  const bool draining = member.draining && ready.worker_id() == member.ready.worker_id() &&
                        ready.instance_id() == member.ready.instance_id();
  absl::Status status = ValidateReady(ready, options_.tokenizer_vocab);
  if (status.ok()) status = CheckIdentity(ready);
  if (status.ok()) {
    absl::StatusOr<WorkerId> worker = scheduler_.AddWorker(ready, now, member.cached, draining);
    if (worker.ok()) member.worker = *worker;
    member.cached.clear();
    member.cached_bytes = 0;
    status = worker.status();
  }
  if (!status.ok()) {
    Refuse(member, status, now);
    return false;
  }
  member.ready = ready;
  member.ready_at = now;
  member.state = draining ? v1::WorkerStatus::STATE_DRAINING : v1::WorkerStatus::STATE_READY;
  member.last_error.clear();
  member.liveness.emplace(now);
  look_at_ = std::min(look_at_, now + Liveness::kLookEvery);
  member.draining = draining;
  member_of_[*member.worker] = id;
  max_sequence_tokens_ = std::min<int64_t>(ready.model().max_context(), scheduler_.max_sequence_tokens());
  SetWake(member, kNever);
  Log(LogLevel::kInfo, "worker_ready",
      {{"address", member.address},
       {"worker", ready.worker_id()},
       {"instance", ready.instance_id()},
       {"model", ready.model().name()},
       {"slots", ready.num_slots()},
       {"blocks", ready.num_blocks()},
       {"cached_blocks", scheduler_.worker_counts(*member.worker).cached_blocks}});
  const bool first = !any_ready_;
  any_ready_ = true;
  return first;
}

// One worker behind two addresses would be given everything twice.
absl::Status Fleet::CheckIdentity(const worker::v1::Ready& ready) const {
  for (const auto& [id, other] : members_) {
    if (!other.worker.has_value() || other.ready.instance_id() != ready.instance_id() ||
        other.ready.worker_id() != ready.worker_id()) {
      continue;
    }
    return absl::AlreadyExistsError(absl::StrCat("worker ", ready.worker_id(), ", instance ", ready.instance_id(),
                                                 ", is connected already, at ", other.address));
  }
  return absl::OkStatus();
}

void Fleet::Drain(Member& member, Time budget, Time now) {
  member.draining = true;
  if (!member.worker.has_value()) return;
  member.state = v1::WorkerStatus::STATE_DRAINING;
  member.empty_at = std::min(member.empty_at, now + budget);
  members_due_ = std::min(members_due_, member.empty_at);
  scheduler_.DrainWorker(*member.worker);
  Log(LogLevel::kInfo, "worker_draining",
      {{"address", member.address}, {"worker", member.ready.worker_id()}, {"budget_ms", budget / 1000}});
}

void Fleet::Refuse(Member& member, const absl::Status& why, Time now) {
  if (member.last_error != why.message()) {
    Log(LogLevel::kError, "worker_refused", {{"address", member.address}, {"error", std::string(why.message())}});
  }
  member.last_error = std::string(why.message());
  member.ended_by_us = true;
  Lose(member, Loss::kFault, now);
  member.state = v1::WorkerStatus::STATE_LOST;
  member.session->End();
}

void Fleet::Lose(Member& member, Loss loss, Time now) {
  if (!member.worker.has_value()) return;
  const WorkerId worker = *member.worker;
  member.worker.reset();
  member.liveness.reset();
  member.empty_at = kNever;
  member_of_.erase(worker);
  member.state = v1::WorkerStatus::STATE_LOST;
  scheduler_.RemoveWorker(worker, now, loss);
  if (now - member.ready_at > kMaxBackoff) member.backoff = 0;
  const bool fault = loss == Loss::kFault;
  member.faults += fault;
  member.short_lives = fault && now - member.ready_at < kShortLife ? member.short_lives + 1 : 0;
  if (member.short_lives < kShortLives) return;
  member.rest = std::min(kFirstRest << std::min(member.short_lives - kShortLives, 8u), kLongestRest);
  Log(LogLevel::kWarning, "worker_rests",
      {{"address", member.address}, {"short_lives", member.short_lives}, {"ms", member.rest / 1000}});
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
  bool taken_over = false;
  {
    absl::MutexLock lock(&mutex_);
    Member& member = members_.at(session->member());
    const Time now = MonotonicNow();
    const std::string error =
        absl::StrCat("stream ended with code ", static_cast<int>(status.error_code()), ": ", status.error_message());
    if (!member.ended_by_us && !stopping_) {
      if (member.worker.has_value() || member.last_error != error) {
        const char* const event = !member.worker.has_value() ? "worker_unreachable"
                                  : member.leaving           ? "worker_left"
                                                             : "worker_lost";
        Log(LogLevel::kWarning, event, {{"address", member.address}, {"error", error}});
      }
      member.last_error = error;
    }
    Lose(member, member.leaving || InOrder(status.error_code()) ? Loss::kLeft : Loss::kFault, now);
    member.ended = std::move(member.session);
    member.ended_by_us = member.leaving = false;
    member.cached.clear();
    member.cached_bytes = 0;
    member.backoff = std::clamp(member.backoff * 2, kMinBackoff, kMaxBackoff);
    SetWake(member, now + std::max(Jittered(member.backoff), std::exchange(member.rest, 0)));
    taken_over = status.error_code() == grpc::StatusCode::ABORTED && !stopping_ && !taken_over_;
    std::vector<std::shared_ptr<SequenceSink>> sinks;
    if (taken_over) sinks = OnTakenOver(now);
    output = TakeOutput();
    output.sinks.insert(output.sinks.end(), sinks.begin(), sinks.end());
  }
  Deliver(std::move(output));
  if (taken_over && options_.on_taken_over) options_.on_taken_over();
}

void Fleet::SetWake(Member& member, Time when) {
  member.wake_at = when;
  members_due_ = std::min(members_due_, when);
}

Time Fleet::NextWake() const { return std::min({members_due_, look_at_, scheduler_.NextDeadline()}); }

void Fleet::LookAtWorkers(Time now) {
  look_at_ = kNever;
  for (auto& [id, member] : members_) {
    if (!member.worker.has_value()) continue;
    const absl::Status verdict = member.liveness->Look(now, scheduler_.WorkLeft(*member.worker));
    if (!verdict.ok()) Refuse(member, verdict, now);
    look_at_ = now + Liveness::kLookEvery;
  }
}

std::vector<WorkerSession*> Fleet::WakeMembers(Time now, std::vector<std::unique_ptr<WorkerSession>>* ended) {
  std::vector<WorkerSession*> fresh;
  members_due_ = kNever;
  for (auto it = members_.begin(); it != members_.end();) {
    auto& [index, member] = *it;
    if (!member.listed && member.session == nullptr) {
      Log(LogLevel::kInfo, "worker_unlisted", {{"address", member.address}, {"service", member.service}});
      ended->push_back(std::move(member.ended));
      it = members_.erase(it);
      continue;
    }
    ++it;
    if (member.empty_at <= now) {
      member.empty_at = kNever;
      scheduler_.EmptyWorker(*member.worker, now);
    }
    if (member.wake_at <= now && member.session == nullptr) {
      worker::v1::Hello hello;
      hello.set_router_id(options_.router_id);
      hello.set_epoch(options_.epoch);
      ended->push_back(std::move(member.ended));
      member.session.reset(new WorkerSession(this, index, member.address, options_.credentials,
                                             std::move(hello)));  // its listener is a private base
      member.wake_at = now + kReadyTimeout;
      fresh.push_back(member.session.get());
    } else if (member.wake_at <= now) {
      Refuse(member, absl::DeadlineExceededError(absl::StrCat("no ready within ", kReadyTimeout / 1'000'000, " s")),
             now);
      member.wake_at = kNever;
    }
    members_due_ = std::min({members_due_, member.wake_at, member.empty_at});
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
    if (look_at_ <= now) LookAtWorkers(now);
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
