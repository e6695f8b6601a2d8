#include "worker/engine/step_packer.h"

#include <algorithm>
#include <tuple>

#include "worker/engine/step_cost.h"

namespace millrace {
namespace {

std::vector<int32_t> WaitingForPrefill(const SlotTable& table) {
  std::vector<int32_t> waiting;
  for (int32_t i = 0; i < static_cast<int32_t>(table.slots().size()); ++i) {
    const Slot& slot = table.at(i);
    if (slot.active && !slot.is_decoding() && table.IsReady(i)) waiting.push_back(i);
  }
  std::ranges::sort(waiting, {}, [&](int32_t i) { return std::tuple(table.at(i).rank, table.at(i).order); });
  return waiting;
}

StepPlan::Chunk MakeChunk(int32_t id, const Slot& slot, int32_t num_tokens) {
  const int32_t end = slot.num_computed_tokens + num_tokens;
  return {id, num_tokens, slot.order, end, NumLogitRows(slot, num_tokens), end == slot.length(), slot.is_decoding(),
          0,  0};
}

// Gives decoding slots rows for their guesses.
void AddGuesses(const SlotTable& table, const EngineLimits& limits, StepPlan& plan) {
  if (table.num_drafting() == 0) return;
  const int32_t rows_left = limits.max_rows - plan.num_decode_rows - kMinPrefillTokens;
  const int32_t logit_rows_left = limits.max_logit_rows - limits.num_slots;
  const int32_t share = std::min(rows_left, logit_rows_left) / table.num_drafting();
  int32_t unread_left = std::min(kMaxUnreadTokens, limits.max_rows);
  for (StepPlan::Chunk& chunk : plan.chunks) {
    const Slot& slot = table.at(chunk.slot);
    int32_t num_guesses = std::min(slot.most_drafts(), share);
    if (num_guesses <= 0) continue;
    if (slot.draft_method == worker::v1::DRAFT_METHOD_LOOKUP) {
      num_guesses = std::min(num_guesses, static_cast<int32_t>(slot.guesses.size()));
    } else {
      const int32_t unread = slot.length() - table.NumDraftRead(slot);
      chunk.num_unread = std::min(unread, unread_left);
      unread_left -= chunk.num_unread;
      if (chunk.num_unread < unread) num_guesses = 0;
    }
    chunk.num_guesses = num_guesses;
    chunk.num_tokens += num_guesses;
    chunk.num_logit_rows += num_guesses;
    plan.num_guesses += num_guesses;
  }
  plan.num_decode_rows += plan.num_guesses;
}

}  // namespace

int32_t NumLogitRows(const Slot& slot, int32_t num_tokens) {
  const int32_t begin = slot.num_computed_tokens, end = begin + num_tokens;
  const int32_t sampled = end == slot.length() ? 1 : 0;
  if (slot.num_prompt_logprobs < 0) return sampled;
  return sampled + std::max(0, std::min(end, slot.num_prompt_tokens - 1) - begin);
}

StepPlan PackStep(const SlotTable& table, const EngineLimits& limits, const worker::v1::StepCost& cost,
                  double target_us) {
  StepPlan plan;
  int64_t decode_context = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(table.slots().size()); ++i) {
    const Slot& slot = table.at(i);
    if (!slot.active || !slot.is_decoding()) continue;
    if (slot.length() >= slot.max_length) continue;  // its last token is under way
    if (!slot.has_room()) {
      plan.stalled.push_back(i);
      continue;
    }
    plan.chunks.push_back(MakeChunk(i, slot, 1));
    decode_context += slot.length();
  }
  plan.num_decode_rows = static_cast<int32_t>(plan.chunks.size());
  AddGuesses(table, limits, plan);

  const bool timed = plan.num_decode_rows > 0;
  int32_t rows_left = limits.max_rows - plan.num_decode_rows;
  int32_t logit_rows_left = limits.max_logit_rows - plan.num_decode_rows;
  double us_left = std::max(target_us - DecodeUs(cost, plan.num_decode_rows, decode_context), cost.step_us());
  bool first = true;
  for (const int32_t i : WaitingForPrefill(table)) {
    const Slot& slot = table.at(i);
    int32_t n = std::min(slot.length() - slot.num_computed_tokens, rows_left);
    if (timed) {
      const auto fitting = static_cast<int32_t>(PrefillFitting(cost, slot.num_computed_tokens, n, us_left));
      n = first ? std::max(fitting, std::min(n, kMinPrefillTokens)) : fitting;
    }
    // A row leads to at most one logit row, so the fewer tokens fit whatever they are.
    if (NumLogitRows(slot, n) > logit_rows_left) n = std::min(n, logit_rows_left);
    if (n <= 0) break;
    plan.chunks.push_back(MakeChunk(i, slot, n));
    rows_left -= n;
    logit_rows_left -= NumLogitRows(slot, n);
    us_left -= PrefillUs(cost, slot.num_computed_tokens, n);
    first = false;
  }
  return plan;
}

}  // namespace millrace
