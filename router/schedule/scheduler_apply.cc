// Apply: a step's report. Every field is checked as it is used; a breach ends the worker, and what was taken over
// before it stays true, since it was checked too.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "router/schedule/scheduler_state.h"

namespace millrace {
namespace {

constexpr double kOutputsRemembered = 256;
constexpr double kOutputWeight = 2;  // of a token of output, beside a computed one of a prompt

}  // namespace

absl::Status Scheduler::Apply(WorkerId id, const worker::v1::StepReport& report, Time now) {
  State& state = *state_;
  const uint32_t place = state.PlaceOf(id);
  if (place == kNone) return absl::NotFoundError(absl::StrCat("worker ", id, " is not here"));
  State::Worker& worker = state.workers[place];
  state.Change(place);
  if (report.step() < worker.steps) {
    return absl::InvalidArgumentError(absl::StrCat("step ", report.step(), " after step ", worker.steps));
  }
  if (absl::Status status = worker.set->Applied(report.applied_edit()); !status.ok()) return status;
  worker.steps = report.step();
  if (report.step_us() != 0) {
    worker.last_step_us = report.step_us();
    worker.set->Measured(report);
    state.last_cost = worker.set->cost();
  }
  for (const worker::v1::Progress& progress : report.prefill()) {
    if (absl::Status status = state.ApplyProgress(&worker, progress, report.applied_edit()); !status.ok())
      return status;
  }
  const size_t num_events = state.events.size() + static_cast<size_t>(report.rows_size());
  if (num_events > state.events.capacity()) state.events.reserve(std::max(num_events, 2 * state.events.capacity()));
  for (const worker::v1::Row& row : report.rows()) {
    if (absl::Status status = state.ApplyRow(&worker, row, report.applied_edit(), now); !status.ok()) return status;
  }
  for (const uint32_t stalled : report.stalled_slots()) {
    const absl::StatusOr<RunningSlot*> slot = worker.set->ReportedSlot(stalled, report.applied_edit());
    if (!slot.ok()) return slot.status();
    if (*slot != nullptr) worker.set->Stalled(*slot);
  }
  state.Return(worker.set->GrowLeases(), now);
  if (report.prefill_size() > 0) worker.set->RefreshRanks(now);
  state.Dispatch(now);
  return absl::OkStatus();
}

absl::Status Scheduler::State::ApplyProgress(Worker* worker, const worker::v1::Progress& progress,
                                             uint64_t applied_edit) {
  const absl::StatusOr<RunningSlot*> found = worker->set->ReportedSlot(progress.slot(), applied_edit);
  if (!found.ok()) return found.status();
  if (*found == nullptr) return absl::OkStatus();
  RunningSlot& slot = **found;
  Sequence& sequence = *slot.sequence;
  if (progress.num_computed_tokens() < slot.num_computed || progress.num_computed_tokens() > sequence.length()) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", progress.slot(), " computed ",
                                                   progress.num_computed_tokens(), " tokens, which is not within ",
                                                   slot.num_computed, " … ", sequence.length()));
  }
  if (progress.prompt_logprobs_size() > 0) {
    const int64_t total = static_cast<int64_t>(sequence.prompt_logprobs.size()) + progress.prompt_logprobs_size();
    if (!sequence.wants_prompt_logprobs() || total >= sequence.num_prompt) {
      return absl::InvalidArgumentError(absl::StrCat("slot ", progress.slot(), " reports ", total,
                                                     " prompt logprobs; it has ",
                                                     sequence.wants_prompt_logprobs() ? sequence.num_prompt - 1 : 0));
    }
    sequence.prompt_logprobs.insert(sequence.prompt_logprobs.end(), progress.prompt_logprobs().begin(),
                                    progress.prompt_logprobs().end());
  }
  worker->set->Computed(&slot, progress.num_computed_tokens());
  return absl::OkStatus();
}

absl::Status Scheduler::State::CheckRow(const RunningSet& set, const RunningSlot& slot,
                                        const worker::v1::Row& row) const {
  const Sequence& sequence = *slot.sequence;
  if (row.num_drafted() > set.speculation().max_length()) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", row.slot(), " drafted ", row.num_drafted(),
                                                   " tokens; its worker drafts at most ",
                                                   set.speculation().max_length()));
  }
  if (static_cast<uint32_t>(row.token_ids_size()) > row.num_drafted() + 1) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", row.slot(), " has ", row.token_ids_size(), " tokens after ",
                                                   row.num_drafted(), " drafted ones; at most one more"));
  }
  const int64_t length = int64_t{sequence.length()} + row.token_ids_size();
  const int64_t leased = static_cast<int64_t>(slot.table.size()) * block_tokens + 1;
  const int64_t limit = std::min<int64_t>(leased, sequence.max_length);
  if (length > limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", row.slot(), " reached ", length, " tokens; its limit is ", limit));
  }
  for (const int32_t token : row.token_ids()) {
    if (token < 0 || static_cast<uint32_t>(token) >= model->vocab_size()) {
      return absl::InvalidArgumentError(absl::StrCat("slot ", row.slot(), " sampled token ", token,
                                                     ", which is not within 0 … ", model->vocab_size() - 1));
    }
  }
  const int wanted = sequence.sampling.has_logprobs() ? row.token_ids_size() : 0;
  if (row.logprobs_size() != wanted) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", row.slot(), " has ", row.logprobs_size(), " logprobs for ",
                                                   row.token_ids_size(), " tokens; expected ", wanted));
  }
  if (row.finish_reason() < worker::v1::FINISH_REASON_UNSPECIFIED ||
      row.finish_reason() > worker::v1::FINISH_REASON_NON_FINITE) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", row.slot(), " ended with reason ", row.finish_reason(),
                                                   " of ", worker::v1::FINISH_REASON_NON_FINITE));
  }
  const bool at_end = length == sequence.max_length;
  const bool goes_on = row.finish_reason() == worker::v1::FINISH_REASON_UNSPECIFIED;
  if (at_end ? goes_on : row.finish_reason() == worker::v1::FINISH_REASON_LENGTH) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", row.slot(),
                                                   goes_on ? " goes on at " : " ended for its length at ", length,
                                                   " tokens; its limit is ", sequence.max_length));
  }
  const bool fails = row.finish_reason() == worker::v1::FINISH_REASON_NON_FINITE;
  if (row.token_ids_size() == 0 && !fails) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", row.slot(), " has a row without a token"));
  }
  if (!fails && sequence.wants_prompt_logprobs() && sequence.prompt_logprobs.size() + 1 != sequence.num_prompt) {
    return absl::InvalidArgumentError(absl::StrCat("slot ", row.slot(), " sampled after ",
                                                   sequence.prompt_logprobs.size(), " prompt logprobs of ",
                                                   sequence.num_prompt - 1));
  }
  return absl::OkStatus();
}

void Scheduler::State::CountGuesses(Worker* worker, RunningSlot* slot, const worker::v1::Row& row,
                                    uint64_t applied_edit) {
  const uint32_t right = static_cast<uint32_t>(std::max(row.token_ids_size(), 1)) - 1;
  const bool last = row.finish_reason() != worker::v1::FINISH_REASON_UNSPECIFIED;
  if (!slot->prefilling) worker->set->Guessed(slot, row.num_drafted(), right, last, applied_edit);
  if (row.num_drafted() == 0) return;
  for (DraftCounts* all : {&worker->drafts, &counts.drafts}) {
    ++all->drafts;
    all->drafted += row.num_drafted();
    all->accepted += right;
    for (uint32_t position = 0; position < right; ++position) ++all->accepted_at[position];
  }
  SequenceReport& report = slot->sequence->report;
  ++report.drafts;
  report.drafted_tokens += row.num_drafted();
  report.accepted_tokens += right;
}

absl::Status Scheduler::State::ApplyRow(Worker* worker, const worker::v1::Row& row, uint64_t applied_edit, Time now) {
  const absl::StatusOr<RunningSlot*> found = worker->set->ReportedSlot(row.slot(), applied_edit);
  if (!found.ok()) return found.status();
  if (*found == nullptr) return absl::OkStatus();
  RunningSlot& slot = **found;
  if (absl::Status status = CheckRow(*worker->set, slot, row); !status.ok()) return status;
  Sequence& sequence = *slot.sequence;
  SequenceEvent& event = events.emplace_back();
  event.sequence = sequence.id;
  const absl::Span<const int32_t> tokens(row.token_ids().data(), static_cast<size_t>(row.token_ids_size()));
  event.token_ids.assign(tokens.begin(), tokens.end());
  event.logprobs.assign(row.logprobs().begin(), row.logprobs().end());
  event.prompt_logprobs = std::move(sequence.prompt_logprobs);
  sequence.prompt_logprobs.clear();
  CountGuesses(worker, &slot, row, applied_edit);
  if (row.token_ids_size() > 0) {
    for (const int32_t token : tokens) sequence.tokens.push_back(token);
    sequence.report.generated_tokens += row.token_ids_size();
    if (sequence.report.first_token == 0) sequence.report.first_token = now;
    sequence.report.last_token = now;
    counts.generated_tokens += static_cast<uint64_t>(row.token_ids_size());
    GotFurther(&sequence);
    queue.Charge(sequence, kOutputWeight * row.token_ids_size(), false);
    worker->set->Appended(&slot, static_cast<uint32_t>(row.token_ids_size()));
  }
  if (row.finish_reason() == worker::v1::FINISH_REASON_UNSPECIFIED) return absl::OkStatus();
  event.finished = true;
  event.finish_reason = row.finish_reason();
  const bool failed = row.finish_reason() == worker::v1::FINISH_REASON_NON_FINITE;
  if (failed) {
    event.status = absl::InternalError(absl::StrCat("the logits after ", sequence.length(), " tokens are not finite"));
  }
  --counts.running;
  ++counts.finished;
  expected_output += (sequence.report.generated_tokens - expected_output) / kOutputsRemembered;
  End(&sequence);
  for (Sequence* orphan : worker->set->Stop(row.slot(), true, failed)) Return(orphan, now);
  return absl::OkStatus();
}

}  // namespace millrace
