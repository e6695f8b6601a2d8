// The running set: a fixed number of slots, each holding one sequence, and for every block which slots use it. Lives as
// long as the engine; used by the engine thread. Bytes: 8 per block; per sequence 4 per token from the first uncached
// one and 4 per block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/ops.h"
#include "millrace/worker/v1/worker.pb.h"
#include "worker/engine/engine_limits.h"

namespace millrace {

// A token that a step under way samples.
inline constexpr int32_t kPendingToken = -1;

struct Slot {
  bool active = false;
  int64_t rank = 0;
  uint64_t order = 0;  // of admission; breaks ties of rank
  int32_t num_cached_tokens = 0;
  int32_t num_prompt_tokens = 0;     // given by the client; the rest is output
  int32_t num_admitted_tokens = 0;   // length at admission: from there on it decodes
  int32_t num_computed_tokens = 0;   // whose k and v are in the cache once the steps launched have ended
  std::vector<int32_t> token_ids;    // of positions num_cached_tokens …; the last may be kPendingToken
  std::vector<int32_t> block_table;  // by position
  std::string cache_salt;
  int32_t filling_slot = -1;  // computes the cached tokens, which this slot waits for; -1: they are there
  bool orphaned = false;      // what it waited for ended too early: it never proceeds, the router releases it
  int32_t min_length = 0;
  int32_t max_length = 0;
  std::vector<int32_t> stop_token_ids;
  SamplingRow sampling;                     // position and bias range are set for each step
  std::vector<LogitBias> biases;            // the client's
  std::vector<LogitBias> biases_below_min;  // and the stop tokens forbidden, for as long as min_length is not reached
  int32_t num_logprobs = -1;                // -1: none wanted
  int32_t num_prompt_logprobs = -1;

  worker::v1::DraftMethod draft_method = worker::v1::DRAFT_METHOD_UNSPECIFIED;
  int32_t max_drafts = 0;                 // in each step
  std::vector<int32_t> all_token_ids;     // from position 0 on, as of the latest step that it was to draft in
  std::vector<int32_t> guesses;           // for the next step, where they are looked up
  int32_t num_draft_computed_tokens = 0;  // whose k and v are in the draft model's own cache

  int32_t length() const { return num_cached_tokens + static_cast<int32_t>(token_ids.size()); }
  int32_t token(int32_t position) const { return token_ids[static_cast<size_t>(position - num_cached_tokens)]; }
  bool is_decoding() const { return length() > num_admitted_tokens; }
  bool has_room() const { return static_cast<int64_t>(block_table.size()) * kBlockTokens > num_computed_tokens; }
  bool has_penalties() const { return sampling.history >= 0; }
  // How many tokens it may draft in the next step, as far as it alone is concerned.
  int32_t most_drafts() const;
};

class SlotTable {
 public:
  explicit SlotTable(const EngineLimits& limits);

  // Each REQUIRES that ValidateEdit has passed the message. INVALID_ARGUMENT if it does not fit the running set; the
  // table is then to be Reset. A slot that has ended by itself is no error where the router could not know of it yet.
  absl::Status Admit(const worker::v1::Admit& admit);
  absl::Status Extend(const worker::v1::Extend& extend);
  void SetRank(const worker::v1::Rank& rank);
  void SetDraft(const worker::v1::Draft& draft);
  void StopDrafting(int32_t slot);

  void Release(int32_t slot);  // an empty slot is ignored
  void Reset();                // empties every slot

  // Its cached tokens are computed.
  bool IsReady(int32_t slot) const;

  const std::vector<Slot>& slots() const { return slots_; }
  Slot& at(int32_t slot) { return slots_[static_cast<size_t>(slot)]; }
  const Slot& at(int32_t slot) const { return slots_[static_cast<size_t>(slot)]; }
  int32_t num_active() const { return num_active_; }
  int32_t num_drafting() const { return num_drafting_; }  // slots that are to draft
  // The draft model's k and v are the target's own. How many tokens of a slot it has read.
  bool draft_shares_cache() const { return limits_.draft_model == DraftModel::kSharedCache; }
  int32_t NumDraftRead(const Slot& slot) const {
    return draft_shares_cache() ? slot.num_computed_tokens : slot.num_draft_computed_tokens;
  }

 private:
  // At most one slot writes a block, and while it does, only slots that know it read along.
  struct Block {
    int32_t writer = -1;
    int32_t num_readers = 0;
  };

  absl::Status CheckFilling(const worker::v1::Admit& admit) const;
  absl::Status TakeCachedBlock(const worker::v1::Admit& admit, int32_t index);
  absl::Status TakeWritableBlock(int32_t slot, uint32_t block);
  bool WaitsFor(int32_t slot, int32_t writer) const;

  EngineLimits limits_;
  std::vector<Slot> slots_;
  std::vector<Block> blocks_;
  int32_t num_active_ = 0;
  int32_t num_drafting_ = 0;
  uint64_t next_order_ = 0;
};

}  // namespace millrace
