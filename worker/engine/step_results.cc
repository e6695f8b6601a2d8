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

FinishReason FinishOf(const Slot& slot, int32_t token) {
  if (std::ranges::find(slot.stop_token_ids, token) != slot.stop_token_ids.end()) {
    return worker::v1::FINISH_REASON_STOP_TOKEN;
  }
  return slot.length() >= slot.max_length ? worker::v1::FINISH_REASON_LENGTH : worker::v1::FINISH_REASON_UNSPECIFIED;
}

// Takes the token sampled from logit row r; what ends the sequence, if anything does.
FinishReason TakeToken(int32_t id, size_t r, const StepInput& input, const StepOutput& output, Slot& slot, Model& model,
                       StepReport& report) {
  const int32_t token = output.tokens[r];
  worker::v1::Row& row = *report.add_rows();
  row.set_slot(static_cast<uint32_t>(id));
  if (token < 0) {
    row.set_finish_reason(worker::v1::FINISH_REASON_NON_FINITE);
    return row.finish_reason();
  }
  slot.token_ids.push_back(token);
  if (slot.has_penalties()) model.CountToken(id, token);
  row.add_token_ids(token);
  if (input.num_logprobs[r] >= 0) SetLogProbs(token, output.logprobs[r], *row.add_logprobs());
  row.set_finish_reason(FinishOf(slot, token));
  return row.finish_reason();
}

}  // namespace

void ApplyStep(const StepPlan& plan, const StepInput& input, const StepOutput& output, SlotTable& table, Model& model,
               StepReport& report) {
  MILLRACE_CHECK(output.tokens.size() == input.logit_rows.size(), "every logit row has a token");
  size_t r = 0;
  for (const auto& [id, num_tokens] : plan.chunks) {
    Slot& slot = table.at(id);
    const size_t end = r + static_cast<size_t>(NumLogitRows(slot, num_tokens));
    slot.num_computed_tokens += num_tokens;
    FinishReason finish = worker::v1::FINISH_REASON_UNSPECIFIED;
    worker::v1::Progress* progress = nullptr;
    if (!slot.is_decoding()) {
      progress = report.add_prefill();
      progress->set_slot(static_cast<uint32_t>(id));
      progress->set_num_computed_tokens(static_cast<uint32_t>(slot.num_computed_tokens));
    }
    for (; r < end && input.target[r] >= 0; ++r) {
      if (!std::isfinite(output.logprobs[r].chosen)) finish = worker::v1::FINISH_REASON_NON_FINITE;
      SetLogProbs(input.target[r], output.logprobs[r], *progress->add_prompt_logprobs());
    }
    if (finish != worker::v1::FINISH_REASON_UNSPECIFIED) {
      worker::v1::Row& row = *report.add_rows();
      row.set_slot(static_cast<uint32_t>(id));
      row.set_finish_reason(finish);
    } else if (r < end) {
      finish = TakeToken(id, r, input, output, slot, model, report);
    }
    r = end;
    if (finish != worker::v1::FINISH_REASON_UNSPECIFIED) table.Release(id);
  }
  MILLRACE_CHECK(r == input.logit_rows.size(), "every logit row belongs to a chunk");
}

}  // namespace millrace
