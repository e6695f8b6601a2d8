#include "worker/model/draft_pass.h"

#include <algorithm>

namespace millrace {
namespace {

void AddRow(const StepInput& input, int32_t sequence, int32_t token, int32_t position, StepInput& out) {
  const int64_t entry = sequence * input.block_table_width + position / kBlockTokens;
  out.tokens.push_back(token);
  out.positions.push_back(position);
  out.kv_slots.push_back(input.block_table[static_cast<size_t>(entry)] * kBlockTokens + position % kBlockTokens);
}

}  // namespace

int32_t NumDraftPasses(const StepInput& input) {
  int32_t most = input.drafts.empty() ? 0 : 1;
  for (const DraftInput& draft : input.drafts) most = std::max(most, draft.count);
  return most;
}

void FillDraftPass(const StepInput& input, int32_t pass, Vec<const int32_t> tokens, StepInput& out,
                   std::vector<int32_t>& guess_rows) {
  out.Clear();
  guess_rows.clear();
  out.query_start.push_back(0);
  out.block_table_width = input.block_table_width;
  out.biases = input.biases;
  for (const DraftInput& draft : input.drafts) {
    if (pass > 0 && draft.count <= pass) continue;
    const int32_t row = input.query_start[static_cast<size_t>(draft.sequence)] + pass;
    int32_t position = draft.position;
    if (pass == 0) {
      for (int32_t i = draft.unread_begin; i < draft.unread_end; ++i) {
        AddRow(input, draft.sequence, input.unread[static_cast<size_t>(i)], position++, out);
      }
    } else {
      position = input.positions[static_cast<size_t>(row)];
      AddRow(input, draft.sequence, tokens[row], position++, out);
    }
    out.query_start.push_back(static_cast<int32_t>(out.num_rows()));
    out.context_len.push_back(position);
    const auto table = input.block_table.begin() + draft.sequence * input.block_table_width;
    out.block_table.insert(out.block_table.end(), table, table + input.block_table_width);
    if (draft.count <= pass) continue;
    guess_rows.push_back(row + 1);
    out.logit_rows.push_back(static_cast<int32_t>(out.num_rows()) - 1);
    out.slots.push_back(tokens[row + 1] < 0 ? ~tokens[row + 1] : -1);
    out.sampling.push_back(input.sampling[static_cast<size_t>(draft.first_logit_row + pass)]);
    out.target.push_back(-1);
    out.num_logprobs.push_back(-1);
    out.is_guess.push_back(false);
  }
}

}  // namespace millrace
