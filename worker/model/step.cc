#include "worker/model/step.h"

namespace millrace {

void StepInput::Clear() {
  for (std::vector<int32_t>* ids : {&tokens, &positions, &kv_slots, &query_start, &context_len, &block_table,
                                    &logit_rows, &slots, &target, &num_logprobs}) {
    ids->clear();
  }
  block_table_width = 0;
  sampling.clear();
  is_guess.clear();
  drafts.clear();
  unread.clear();
  biases.clear();
}

}  // namespace millrace
