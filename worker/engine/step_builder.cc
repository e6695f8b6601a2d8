#include "worker/engine/step_builder.h"

#include <algorithm>

#include "kernels/check.h"

namespace millrace {
namespace {

int64_t NumBlocksInUse(const Slot& slot, int32_t num_tokens) {
  return (slot.num_computed_tokens + num_tokens + kBlockTokens - 1) / kBlockTokens;
}

void AddRows(int32_t id, const Slot& slot, int32_t num_tokens, StepInput& input) {
  const int32_t begin = slot.num_computed_tokens, end = begin + num_tokens;
  for (int32_t p = begin; p < end; ++p) {
    const auto block_index = static_cast<size_t>(p / kBlockTokens);
    MILLRACE_CHECK(block_index < slot.block_table.size(), "a computed position has a block", p);
    const int32_t token = slot.token(p);
    input.tokens.push_back(token == kPendingToken ? ~id : token);
    input.positions.push_back(p);
    input.kv_slots.push_back(slot.block_table[block_index] * kBlockTokens + p % kBlockTokens);
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
                 StepInput& input) {
  input.logit_rows.push_back(row);
  input.slots.push_back(slot);
  input.target.push_back(target);
  input.num_logprobs.push_back(num_logprobs);
  input.sampling.push_back(sampling);
}

void AddLogitRows(int32_t id, const Slot& slot, int32_t num_tokens, StepInput& input) {
  const int32_t begin = slot.num_computed_tokens, end = begin + num_tokens;
  const int32_t first_row = static_cast<int32_t>(input.tokens.size()) - num_tokens;
  if (slot.num_prompt_logprobs >= 0) {
    for (int32_t p = begin; p < std::min(end, slot.num_prompt_tokens - 1); ++p) {
      AddLogitRow(first_row + p - begin, -1, slot.token(p + 1), slot.num_prompt_logprobs, {}, input);
    }
  }
  if (end < slot.length()) return;
  SamplingRow sampling = slot.sampling;
  sampling.position = slot.length();
  const auto& biases = slot.length() < slot.min_length ? slot.biases_below_min : slot.biases;
  sampling.bias_begin = static_cast<int32_t>(input.biases.size());
  input.biases.insert(input.biases.end(), biases.begin(), biases.end());
  sampling.bias_end = static_cast<int32_t>(input.biases.size());
  AddLogitRow(first_row + num_tokens - 1, id, -1, slot.num_logprobs, sampling, input);
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
    const int32_t num_tokens = chunk.num_tokens;
    const Slot& slot = table.at(chunk.slot);
    AddRows(chunk.slot, slot, num_tokens, input);
    AddLogitRows(chunk.slot, slot, num_tokens, input);
    if (chunk.is_decoding) {
      decode_context += static_cast<uint64_t>(slot.length());
    } else {
      const auto n = static_cast<uint64_t>(num_tokens);
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
