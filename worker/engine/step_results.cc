#include <algorithm>
#include <cmath>

#include "kernels/check.h"
#include "worker/engine/step_builder.h"

namespace millrace {
namespace {

using worker::v1::FinishReason;
using worker::v1::StepReport;

void SetLogProbs(int32_t token, const TokenLogProbs& from, worker::v1::LogProbs& to) {
  to.set_token_id(token);
  to.set_logprob(from.chosen);
  to.mutable_top_token_ids()->Assign(from.top_tokens.begin(), from.top_tokens.end());
  to.mutable_top_logprobs()->Assign(from.top_values.begin(), from.top_values.end());
}

FinishReason FinishOf(const Slot& slot, int32_t length, int32_t token) {
  if (std::ranges::find(slot.stop_token_ids, token) != slot.stop_token_ids.end()) {
    return worker::v1::FINISH_REASON_STOP_TOKEN;
  }
  return length >= slot.max_length ? worker::v1::FINISH_REASON_LENGTH : worker::v1::FINISH_REASON_UNSPECIFIED;
}

// Takes the tokens sampled from logit row r on, as far as the guesses were right and the sequence goes.
void TakeTokens(size_t r, const StepInput& input, const StepOutput& output, StepPlan::Chunk& chunk, Slot& slot,
                StepReport& report) {
  worker::v1::Row& row = *report.add_rows();
  row.set_slot(static_cast<uint32_t>(chunk.slot));
  row.set_num_drafted(static_cast<uint32_t>(chunk.num_guesses));
  for (const size_t last = r + static_cast<size_t>(chunk.num_guesses); r <= last; ++r) {
    const int32_t token = output.tokens[r];
    if (token == kNotReached) break;
    if (input.is_guess[r]) {  // and it was right
      ++chunk.end;
      slot.num_computed_tokens = chunk.end;
      slot.token_ids.push_back(kPendingToken);
    }
    if (token < 0) {
      row.set_finish_reason(worker::v1::FINISH_REASON_NON_FINITE);
      break;
    }
    int32_t& pending = slot.token_ids[static_cast<size_t>(chunk.end - slot.num_cached_tokens)];
    MILLRACE_CHECK(pending == kPendingToken, "a sampled token was awaited", chunk.slot, chunk.end);
    pending = token;
    row.add_token_ids(token);
    if (input.num_logprobs[r] >= 0) SetLogProbs(token, output.logprobs[r], *row.add_logprobs());
    row.set_finish_reason(FinishOf(slot, chunk.end + 1, token));
    if (row.finish_reason() != worker::v1::FINISH_REASON_UNSPECIFIED) break;
  }
}

// The results of one sequence, whose logit rows begin at r.
void ApplyChunk(size_t r, const StepInput& input, const StepOutput& output, StepPlan::Chunk& chunk, Slot& slot,
                StepReport& report) {
  const size_t end = r + static_cast<size_t>(chunk.num_logit_rows);
  worker::v1::Progress* progress = nullptr;
  if (!chunk.is_decoding) {
    progress = report.add_prefill();
    progress->set_slot(static_cast<uint32_t>(chunk.slot));
    progress->set_num_computed_tokens(static_cast<uint32_t>(chunk.end));
  }
  bool is_finite = true;
  for (; r < end && input.target[r] >= 0; ++r) {
    is_finite &= std::isfinite(output.logprobs[r].chosen);
    SetLogProbs(input.target[r], output.logprobs[r], *progress->add_prompt_logprobs());
  }
  if (!is_finite) {
    worker::v1::Row& row = *report.add_rows();
    row.set_slot(static_cast<uint32_t>(chunk.slot));
    row.set_finish_reason(worker::v1::FINISH_REASON_NON_FINITE);
    return;
  }
  const int32_t least_end = chunk.end;
  if (r < end) TakeTokens(r, input, output, chunk, slot, report);
  // The draft model has read what it guessed too, but for its last guess.
  const int32_t num_right = chunk.end - least_end;
  if (chunk.num_unread == 0) return;
  slot.num_draft_computed_tokens += chunk.num_unread + std::min(num_right, std::max(0, chunk.num_guesses - 1));
}

}  // namespace

void AdvancePast(const StepPlan& plan, SlotTable& table) {
  for (const StepPlan::Chunk& chunk : plan.chunks) {
    Slot& slot = table.at(chunk.slot);
    slot.num_computed_tokens = chunk.end;
    if (chunk.samples) slot.token_ids.push_back(kPendingToken);
  }
}

void ApplyStep(const StepInput& input, const StepOutput& output, StepPlan& plan, SlotTable& table, StepReport& report) {
  MILLRACE_CHECK(output.tokens.size() == input.logit_rows.size(), "every logit row has a token");
  size_t r = 0;
  for (StepPlan::Chunk& chunk : plan.chunks) {
    Slot& slot = table.at(chunk.slot);
    if (slot.active && slot.order == chunk.order) ApplyChunk(r, input, output, chunk, slot, report);
    r += static_cast<size_t>(chunk.num_logit_rows);
  }
  MILLRACE_CHECK(r == input.logit_rows.size(), "every logit row belongs to a chunk");
}

}  // namespace millrace
