#include "router/api/generate_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "router/api/wire.h"
#include "router/fleet/clock.h"

namespace millrace {

GenerateCall::GenerateCall(Fleet* fleet, CallRegistry* registry, RequestMetrics* metrics, std::string request_id,
                           std::vector<ChoiceStream> choices, Time arrived)
    : fleet_(fleet),
      registry_(registry),
      request_id_(std::move(request_id)),
      record_(metrics, request_id_, arrived, choices.size()),
      choices_(std::move(choices)) {}

void GenerateCall::Begin(std::vector<SequenceId> sequences, RequestTrace trace) {
  std::vector<size_t> useless;
  {
    absl::MutexLock lock(&mutex_);
    sequences_ = std::move(sequences);
    record_.SetTrace(std::move(trace));
    begun_ = true;
    if (failure_.has_value()) useless = Fail(*failure_, true);
  }
  CancelSequences(useless);
  Wake();
}

void GenerateCall::Abort(const grpc::Status& status) {
  std::vector<size_t> useless;
  {
    absl::MutexLock lock(&mutex_);
    useless = Fail(status, true);
    WriteNext();
  }
  CancelSequences(useless);
}

void GenerateCall::Push(SequenceUpdate update) {
  absl::MutexLock lock(&inbox_mutex_);
  inbox_.push_back(std::move(update));
}

void GenerateCall::Wake() {
  std::vector<size_t> useless;
  {
    absl::MutexLock lock(&mutex_);
    if (!begun_) return;
    useless = DrainInbox();
    WriteNext();
  }
  CancelSequences(useless);
  UpdatePause();
}

std::vector<size_t> GenerateCall::DrainInbox() {
  std::vector<SequenceUpdate> updates;
  {
    absl::MutexLock lock(&inbox_mutex_);
    updates.swap(inbox_);
  }
  std::vector<size_t> useless;
  const Time now = MonotonicNow();
  for (const SequenceUpdate& update : updates) record_.OnUpdate(update, now);
  for (const SequenceUpdate& update : updates) {
    if (failure_.has_value()) return useless;
    // Nothing is kept for a client that was paused for too long.
    if (!update.event.status.ok()) return Fail(ToGrpcStatus(update.event.status), paused_);
    const auto index = static_cast<size_t>(update.choice);
    ChoiceStream& choice = choices_[index];
    const bool had_ended = choice.ended();
    choice.Append(update.event);
    if (update.outcome.has_value()) {
      choice.Complete(*update.outcome);
    } else if (choice.ended() && !had_ended) {
      useless.push_back(index);
    }
  }
  const size_t pending_bytes = PendingBytes();
  paused_ = paused_ || pending_bytes > kPauseBytes;
  if (pending_bytes <= kMaxPendingBytes) return useless;
  return Fail({grpc::StatusCode::RESOURCE_EXHAUSTED, absl::StrCat("the client reads too slowly: ", pending_bytes,
                                                                  " bytes wait; the limit is ", kMaxPendingBytes)},
              true);
}

std::vector<size_t> GenerateCall::Fail(const grpc::Status& status, bool drop_pending) {
  if (!failure_.has_value()) failure_ = status;
  std::vector<size_t> useless;
  for (size_t i = 0; i < choices_.size(); ++i) {
    if (drop_pending) choices_[i].DropPending();
    if (!choices_[i].complete() && i < sequences_.size()) useless.push_back(i);
  }
  return useless;
}

// A sequence that can no longer be cancelled has ended by itself, and its last update is in the inbox or has been
// there.
void GenerateCall::CancelSequences(const std::vector<size_t>& choices) {
  for (const size_t index : choices) {
    SequenceId sequence;
    {
      absl::MutexLock lock(&mutex_);
      sequence = sequences_[index];
    }
    const std::optional<SequenceOutcome> outcome = fleet_->Cancel(sequence);
    if (!outcome.has_value()) continue;
    absl::MutexLock lock(&mutex_);
    record_.OnCancelled(index, *outcome, failure_.has_value() ? Ending::kAbort : Ending::kStop, MonotonicNow());
    if (failure_.has_value()) continue;
    choices_[index].Complete(*outcome);
    WriteNext();
  }
}

void GenerateCall::WriteNext() {
  if (writing_ || finished_) return;
  bool all_complete = true;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const size_t index = (next_choice_ + i) % choices_.size();
    ChoiceStream& choice = choices_[index];
    all_complete = all_complete && choice.complete();
    if (!choice.has_message()) continue;
    next_choice_ = index + 1;
    out_ = SerializeMessage(choice.TakeMessage());
    paused_ = paused_ && PendingBytes() > kPauseBytes / 2;
    writing_ = true;
    StartWrite(&out_);
    return;
  }
  // A failure before Begin waits for it: only then are all sequences known and can be cancelled.
  if (!begun_ || (!failure_.has_value() && !all_complete)) return;
  finished_ = true;
  record_.OnFinish(failure_.value_or(grpc::Status::OK).error_code(), MonotonicNow());
  Finish(failure_.value_or(grpc::Status::OK));
}

void GenerateCall::OnWriteDone(bool ok) {
  std::vector<size_t> useless;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    out_.Clear();
    if (!ok) useless = Fail(grpc::Status::CANCELLED, true);
    WriteNext();
  }
  CancelSequences(useless);
  UpdatePause();
}

size_t GenerateCall::PendingBytes() const {
  size_t bytes = 0;
  for (const ChoiceStream& choice : choices_) bytes += choice.pending_bytes();
  return bytes;
}

// One thread at a time speaks to the fleet, so that the last thing it hears is the last that was decided.
void GenerateCall::UpdatePause() {
  while (true) {
    bool paused;
    std::vector<SequenceId> sequences;
    {
      absl::MutexLock lock(&mutex_);
      if (telling_ || paused_ == told_paused_ || finished_) return;
      telling_ = true;
      paused = told_paused_ = paused_;
      sequences = sequences_;
    }
    fleet_->SetPaused(sequences, paused);
    absl::MutexLock lock(&mutex_);
    telling_ = false;
  }
}

void GenerateCall::OnDone() { registry_->Remove(std::string(request_id_)); }

}  // namespace millrace
