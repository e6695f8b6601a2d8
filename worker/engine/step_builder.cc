#include "worker/engine/step_builder.h"

#include <algorithm>

#include "kernels/check.h"

namespace millrace {
namespace {

int64_t NumBlocksInUse(const Slot& slot, int32_t num_tokens) {
  return (slot.num_computed_tokens + num_tokens + kBlockTokens - 1) / kBlockTokens;
}

void AddRow(const Slot& slot, int32_t token, int32_t position, StepInput& input) {
  const auto block_index = static_cast<size_t>(position / kBlockTokens);
  MILLRACE_CHECK(block_index < slot.block_table.size(), "a computed position has a block", position);
  input.tokens.push_back(token);
  input.positions.push_back(position);
  input.kv_slots.push_back(slot.block_table[block_index] * kBlockTokens + position % kBlockTokens);
}

void AddRows(const StepPlan::Chunk& chunk, const Slot& slot, StepInput& input) {
  const int32_t begin = slot.num_computed_tokens, end = begin + chunk.num_tokens, known = end - chunk.num_guesses;
  for (int32_t p = begin; p < known; ++p) {
    const int32_t token = slot.token(p);
    AddRow(slot, token == kPendingToken ? ~chunk.slot : token, p, input);
  }
  const bool looked_up = slot.draft_method == worker::v1::DRAFT_METHOD_LOOKUP;
  for (int32_t p = known; p < end; ++p) {
    AddRow(slot, looked_up ? slot.guesses[static_cast<size_t>(p - known)] : kGuessedToken, p, input);
  }
  input.query_start.push_back(static_cast<int32_t>(input.tokens.size()));
  input.context_len.push_back(end);
  const auto width = static_cast<size_t>(input.block_table_width);
  const size_t used = std::min(width, slot.block_table.size());
  input.block_table.insert(input.block_table.end(), slot.block_table.begin(),
                           slot.block_table.begin() + static_cast<std::ptrdiff_t>(used));
  input.block_table.resize(input.context_len.size() * width, 0);
}

void AddLogitRow(int32_t row, int32_t slot, int32_t target, int32_t num_logprobs, const SamplingRow& sampling,
                 bool is_guess, StepInput& input) {
  input.logit_rows.push_back(row);
  input.slots.push_back(slot);
  input.target.push_back(target);
  input.num_logprobs.push_back(num_logprobs);
  input.sampling.push_back(sampling);
  input.is_guess.push_back(is_guess);
}

void AddLogitRows(const StepPlan::Chunk& chunk, const Slot& slot, StepInput& input) {
  const int32_t begin = slot.num_computed_tokens, end = begin + chunk.num_tokens;
  const int32_t first_row = static_cast<int32_t>(input.tokens.size()) - chunk.num_tokens;
  if (slot.num_prompt_logprobs >= 0) {
    for (int32_t p = begin; p < std::min(end, slot.num_prompt_tokens - 1); ++p) {
      AddLogitRow(first_row + p - begin, -1, slot.token(p + 1), slot.num_prompt_logprobs, {}, false, input);
    }
  }
  for (int32_t position = slot.length(); position <= end; ++position) {  // of what is sampled
    SamplingRow sampling = slot.sampling;
    sampling.position = position;
    const auto& biases = position < slot.min_length ? slot.biases_below_min : slot.biases;
    sampling.bias_begin = static_cast<int32_t>(input.biases.size());
    input.biases.insert(input.biases.end(), biases.begin(), biases.end());
    sampling.bias_end = static_cast<int32_t>(input.biases.size());
    const bool is_guess = position > slot.length();
    AddLogitRow(first_row + position - 1 - begin, is_guess ? -1 : chunk.slot, -1, slot.num_logprobs, sampling, is_guess,
                input);
  }
}

void AddDraft(const StepPlan::Chunk& chunk, const Slot& slot, int32_t num_read, StepInput& input) {
  if (chunk.num_unread == 0) return;
  DraftInput draft;
  draft.sequence = static_cast<int32_t>(input.context_len.size()) - 1;
  draft.count = chunk.num_guesses;
  draft.first_logit_row = static_cast<int32_t>(input.logit_rows.size()) - chunk.num_logit_rows;
  draft.position = num_read;
  draft.unread_begin = static_cast<int32_t>(input.unread.size());
  for (int32_t p = draft.position; p < draft.position + chunk.num_unread; ++p) {
    input.unread.push_back(slot.all_token_ids[static_cast<size_t>(p)]);
  }
  draft.unread_end = static_cast<int32_t>(input.unread.size());
  input.drafts.push_back(draft);
}

}  // namespace

void BuildStep(const SlotTable& table, const StepPlan& plan, StepInput& input, worker::v1::StepReport& report) {
  input.Clear();
  input.query_start.push_back(0);
  for (const StepPlan::Chunk& chunk : plan.chunks) {
    input.block_table_width = std::max(input.block_table_width, NumBlocksInUse(table.at(chunk.slot), chunk.num_tokens));
  }
  uint64_t decode_context = 0, prefill_context = 0, prefill_tokens = 0;
  for (const StepPlan::Chunk& chunk : plan.chunks) {
    const Slot& slot = table.at(chunk.slot);
    AddRows(chunk, slot, input);
    AddLogitRows(chunk, slot, input);
    AddDraft(chunk, slot, table.NumDraftRead(slot), input);
    if (chunk.is_decoding) {
      decode_context += static_cast<uint64_t>(slot.length());
    } else {
      const auto n = static_cast<uint64_t>(chunk.num_tokens);
      prefill_tokens += n;
      prefill_context += n * static_cast<uint64_t>(slot.num_computed_tokens) + n * (n - 1) / 2;
    }
  }
  report.set_decode_rows(static_cast<uint32_t>(plan.num_decode_rows));
  report.set_prefill_tokens(static_cast<uint32_t>(prefill_tokens));
  report.set_decode_context(decode_context);
  report.set_prefill_context(prefill_context);
}

}  // namespace millrace
