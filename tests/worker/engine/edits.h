// Edits for tests, written short.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "millrace/worker/v1/worker.pb.h"
#include "worker/engine/engine_limits.h"

namespace millrace::testing {

inline EngineLimits SmallLimits() {
  return {
      .num_slots = 8, .num_blocks = 64, .vocab_size = 100, .max_context = 512, .max_rows = 64, .max_logit_rows = 16};
}

inline std::vector<int32_t> Prompt(int32_t length, int32_t first = 1) {
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  for (int32_t i = 0; i < length; ++i) tokens[static_cast<size_t>(i)] = (first + i * 7) % 100;
  return tokens;
}

// Blocks first, first + 1, …
inline std::vector<uint32_t> Blocks(uint32_t first, int count) {
  std::vector<uint32_t> blocks(static_cast<size_t>(count));
  std::iota(blocks.begin(), blocks.end(), first);
  return blocks;
}

// Greedy, to at most `max_length` tokens.
inline worker::v1::Admit MakeAdmit(uint32_t slot, const std::vector<int32_t>& prompt,
                                   const std::vector<uint32_t>& blocks, uint32_t max_length,
                                   uint32_t num_cached_tokens = 0) {
  worker::v1::Admit admit;
  admit.set_slot(slot);
  admit.set_num_cached_tokens(num_cached_tokens);
  admit.mutable_token_ids()->Assign(prompt.begin() + num_cached_tokens, prompt.end());
  admit.mutable_block_table()->Assign(blocks.begin(), blocks.end());
  admit.set_num_prompt_tokens(static_cast<uint32_t>(prompt.size()));
  admit.set_max_length(max_length);
  admit.mutable_sampling()->set_top_p(1);
  admit.mutable_sampling()->set_repetition_penalty(1);
  return admit;
}

inline worker::v1::Edit MakeEdit(uint64_t id, const std::vector<worker::v1::Admit>& admits = {},
                                 const std::vector<uint32_t>& releases = {}) {
  worker::v1::Edit edit;
  edit.set_edit_id(id);
  for (const auto& admit : admits) *edit.add_admit() = admit;
  edit.mutable_release()->Assign(releases.begin(), releases.end());
  return edit;
}

inline void AddExtend(worker::v1::Edit& edit, uint32_t slot, const std::vector<uint32_t>& blocks) {
  auto* extend = edit.add_extend();
  extend->set_slot(slot);
  extend->mutable_block_table()->Assign(blocks.begin(), blocks.end());
}

}  // namespace millrace::testing
