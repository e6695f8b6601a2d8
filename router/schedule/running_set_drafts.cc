// Speculation of a running set: when lengths are decided, and which of them the worker has yet to be told.
#include <algorithm>

#include "router/schedule/running_set.h"

namespace millrace {
namespace {

constexpr uint32_t kReportsBetween = 8;         // decisions, while the load stays as it is
constexpr uint32_t kReportsBetweenChanges = 4;  // while it changes

}  // namespace

void RunningSet::Guessed(RunningSlot* slot, uint32_t guessed, uint32_t right, bool ended, uint64_t applied_edit) {
  if (applied_edit < slot->draft_edit) return;  // a step of an earlier choice
  policy_.Learn(slot->told_draft, guessed, right, ended, &slot->sequence->guesses);
}

void RunningSet::SetDraft(RunningSlot* slot, const DraftChoice& choice) {
  drafted_ahead_ += choice.length;
  drafted_ahead_ -= slot->draft.length;
  slot->draft = choice;
  if (!(choice == slot->told_draft)) draft_.push_back(IdOf(*slot));
}

void RunningSet::StopDrafting() {
  draft_.clear();
  for (RunningSlot& slot : slots_) {
    if (slot.state == RunningSlot::State::kRunning) SetDraft(&slot, {});
  }
}

void RunningSet::DecideDrafts(bool others_wait) {
  if (!policy_.active()) return;
  if (others_wait || !prefills_.empty() || !hungry_.empty()) {
    if (drafted_ahead_ > 0) StopDrafting();
    drafts_due_ = true;
    return;
  }
  const bool changed = decode_rows_ != rows_at_decision_;
  if (!drafts_due_ && reports_ < (changed ? kReportsBetweenChanges : kReportsBetween)) return;
  candidates_.clear();
  const auto decodes = [](const RunningSlot& slot) { return slot.state == RunningSlot::State::kRunning; };
  for (const RunningSlot& slot : slots_) {
    if (!decodes(slot)) continue;
    candidates_.push_back({&slot.sequence->guesses, slot.sequence->length(), slot.draft, !slot.draft_decided});
  }
  policy_.Decide(cost(), std::min(reports_, 2 * kReportsBetween), absl::MakeSpan(candidates_));
  draft_.clear();
  auto candidate = candidates_.begin();
  for (RunningSlot& slot : slots_) {
    if (!decodes(slot)) continue;
    SetDraft(&slot, (candidate++)->choice);
    slot.draft_decided = true;
  }
  drafts_due_ = false;
  rows_at_decision_ = decode_rows_;
  reports_ = 0;
}

double RunningSet::MeanDraftLength() const {
  return decode_rows_ == 0 ? 0 : static_cast<double>(drafted_ahead_) / decode_rows_;
}

}  // namespace millrace
