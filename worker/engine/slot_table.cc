#include "worker/engine/slot_table.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace millrace {
namespace {

SamplingRow MakeSamplingRow(const worker::v1::Sampling& sampling, int32_t slot) {
  SamplingRow row;
  row.temperature = sampling.temperature();
  row.top_k = static_cast<int32_t>(sampling.top_k());
  row.top_p = sampling.top_p();
  row.min_p = sampling.min_p();
  row.repetition_penalty = sampling.repetition_penalty();
  row.presence_penalty = sampling.presence_penalty();
  row.frequency_penalty = sampling.frequency_penalty();
  const bool penalised = row.repetition_penalty != 1 || row.presence_penalty != 0 || row.frequency_penalty != 0;
  row.history = penalised ? slot : -1;
  row.seed = sampling.seed();
  return row;
}

void SetBiases(const worker::v1::Admit& admit, Slot& slot) {
  const auto& sampling = admit.sampling();
  for (int i = 0; i < sampling.bias_token_ids_size(); ++i) {
    slot.biases.push_back({sampling.bias_token_ids(i), sampling.bias_values(i)});
  }
  slot.biases_below_min = slot.biases;
  for (const int32_t stop : slot.stop_token_ids) {
    const auto same = std::ranges::find(slot.biases_below_min, stop, &LogitBias::token);
    constexpr float kForbidden = -std::numeric_limits<float>::infinity();
    if (same != slot.biases_below_min.end()) {
      same->value = kForbidden;
    } else {
      slot.biases_below_min.push_back({stop, kForbidden});
    }
  }
}

}  // namespace

// Its last row is at most the last one of its lease, and what that row samples the last token of its length.
int32_t Slot::most_drafts() const {
  const int64_t room = static_cast<int64_t>(block_table.size()) * kBlockTokens - length();
  return static_cast<int32_t>(std::clamp<int64_t>(std::min<int64_t>(room, max_length - length() - 1), 0, max_drafts));
}

SlotTable::SlotTable(const EngineLimits& limits)
    : limits_(limits), slots_(static_cast<size_t>(limits.num_slots)), blocks_(static_cast<size_t>(limits.num_blocks)) {}

absl::Status SlotTable::Admit(const worker::v1::Admit& admit) {
  const auto id = static_cast<int32_t>(admit.slot());
  if (at(id).active) return absl::InvalidArgumentError(absl::StrCat("admit.slot is ", id, ", which is not empty"));
  if (auto status = CheckFilling(admit); !status.ok()) return status;
  const auto num_cached_blocks = static_cast<int32_t>(admit.num_cached_tokens() / kBlockTokens);
  for (int32_t i = 0; i < admit.block_table_size(); ++i) {
    const absl::Status status =
        i < num_cached_blocks ? TakeCachedBlock(admit, i) : TakeWritableBlock(id, admit.block_table(i));
    if (!status.ok()) return status;
  }

  Slot slot;
  slot.active = true;
  slot.rank = admit.rank();
  slot.order = next_order_++;
  slot.num_cached_tokens = slot.num_computed_tokens = static_cast<int32_t>(admit.num_cached_tokens());
  slot.num_prompt_tokens = static_cast<int32_t>(admit.num_prompt_tokens());
  slot.token_ids.assign(admit.token_ids().begin(), admit.token_ids().end());
  slot.num_admitted_tokens = slot.length();
  slot.block_table.assign(admit.block_table().begin(), admit.block_table().end());
  if (admit.has_filling_slot() && at(static_cast<int32_t>(admit.filling_slot())).active) {
    slot.filling_slot = static_cast<int32_t>(admit.filling_slot());
  }
  slot.cache_salt = admit.cache_salt();
  slot.min_length = static_cast<int32_t>(admit.min_length());
  slot.max_length = static_cast<int32_t>(admit.max_length());
  slot.stop_token_ids.assign(admit.stop_token_ids().begin(), admit.stop_token_ids().end());
  slot.sampling = MakeSamplingRow(admit.sampling(), id);
  SetBiases(admit, slot);
  if (admit.sampling().has_logprobs()) slot.num_logprobs = static_cast<int32_t>(admit.sampling().logprobs());
  if (admit.sampling().has_prompt_logprobs()) {
    slot.num_prompt_logprobs = static_cast<int32_t>(admit.sampling().prompt_logprobs());
  }
  at(id) = std::move(slot);
  ++num_active_;
  return absl::OkStatus();
}

// A filling slot may have ended by itself, unknown to the router yet: what it computed is then still on record.
absl::Status SlotTable::CheckFilling(const worker::v1::Admit& admit) const {
  if (!admit.has_filling_slot()) return absl::OkStatus();
  const Slot& filling = at(static_cast<int32_t>(admit.filling_slot()));
  if (filling.active) return absl::OkStatus();
  const uint32_t num_blocks = admit.num_cached_tokens() / kBlockTokens;
  const bool computed =
      filling.num_computed_tokens >= static_cast<int32_t>(admit.num_cached_tokens()) &&
      num_blocks <= filling.block_table.size() &&
      std::equal(admit.block_table().begin(), admit.block_table().begin() + static_cast<int>(num_blocks),
                 filling.block_table.begin(), [](uint32_t a, int32_t b) { return static_cast<int32_t>(a) == b; });
  if (computed) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("admit.filling_slot is ", admit.filling_slot(),
                                                 ", which is empty and has not computed num_cached_tokens, ",
                                                 admit.num_cached_tokens()));
}

// A block that is still written may be read from by those that wait for its writer, or whose part of it is computed.
absl::Status SlotTable::TakeCachedBlock(const worker::v1::Admit& admit, int32_t index) {
  const auto id = static_cast<int32_t>(admit.block_table(index));
  Block& block = blocks_[static_cast<size_t>(id)];
  if (block.writer >= 0) {
    const Slot& writer = at(block.writer);
    const auto i = static_cast<size_t>(index);
    const bool same_place = i < writer.block_table.size() && writer.block_table[i] == id;
    const bool computed = (index + 1) * kBlockTokens <= writer.num_computed_tokens;
    const bool waits = admit.has_filling_slot() && WaitsFor(static_cast<int32_t>(admit.filling_slot()), block.writer);
    if (!same_place || (!computed && !waits)) {
      return absl::InvalidArgumentError(
          absl::StrCat("admit.block_table[", index, "] is ", id, ", a cached block that slot ", block.writer,
                       " still writes; the limit is a block that is computed, or filling_slot naming its writer"));
    }
  }
  ++block.num_readers;
  return absl::OkStatus();
}

absl::Status SlotTable::TakeWritableBlock(int32_t slot, uint32_t id) {
  Block& block = blocks_[id];
  if (block.writer >= 0 || block.num_readers > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_table of slot ", slot, " has block ", id,
                     " to write, which is in use; the limit is one slot for a writable block"));
  }
  block.writer = slot;
  return absl::OkStatus();
}

// `slot` is `writer`, or waits for it, directly or through others.
bool SlotTable::WaitsFor(int32_t slot, int32_t writer) const {
  for (; slot >= 0; slot = at(slot).filling_slot) {  // ends: a slot waits for slots that were admitted before it
    if (slot == writer) return true;
  }
  return false;
}

absl::Status SlotTable::Extend(const worker::v1::Extend& extend) {
  const auto id = static_cast<int32_t>(extend.slot());
  Slot& slot = at(id);
  if (!slot.active) return absl::OkStatus();
  const auto size = static_cast<int64_t>(slot.block_table.size()) + extend.block_table_size();
  if (size > limits_.max_table_blocks()) {
    return absl::InvalidArgumentError(absl::StrCat("extend.block_table makes the table of slot ", id, " ", size,
                                                   " blocks long; the limit is ", limits_.max_table_blocks()));
  }
  for (const uint32_t block : extend.block_table()) {
    if (auto status = TakeWritableBlock(id, block); !status.ok()) return status;
    slot.block_table.push_back(static_cast<int32_t>(block));
  }
  return absl::OkStatus();
}

void SlotTable::SetRank(const worker::v1::Rank& rank) {
  Slot& slot = at(static_cast<int32_t>(rank.slot()));
  if (slot.active) slot.rank = rank.rank();
}

void SlotTable::SetDraft(const worker::v1::Draft& draft) {
  Slot& slot = at(static_cast<int32_t>(draft.slot()));
  if (!slot.active || (slot.has_penalties() && !limits_.guesses_with_penalties)) return;
  StopDrafting(static_cast<int32_t>(draft.slot()));
  if (draft.length() == 0) return;
  slot.draft_method = draft.method();
  slot.max_drafts = static_cast<int32_t>(draft.length());
  ++num_drafting_;
}

void SlotTable::StopDrafting(int32_t id) {
  Slot& slot = at(id);
  if (slot.max_drafts > 0) --num_drafting_;
  slot.max_drafts = 0;
  slot.draft_method = worker::v1::DRAFT_METHOD_UNSPECIFIED;
  slot.guesses.clear();
}

// The slot keeps its block table and num_computed_tokens for CheckFilling until the next admission.
void SlotTable::Release(int32_t id) {
  Slot& slot = at(id);
  if (!slot.active) return;
  for (int32_t other = 0; other < limits_.num_slots; ++other) {
    Slot& waiting = at(other);
    if (!waiting.active || waiting.filling_slot != id) continue;
    waiting.orphaned = !IsReady(other);
    waiting.filling_slot = -1;
  }
  const auto num_cached_blocks = static_cast<size_t>(slot.num_cached_tokens / kBlockTokens);
  for (size_t i = 0; i < slot.block_table.size(); ++i) {
    Block& block = blocks_[static_cast<size_t>(slot.block_table[i])];
    if (i < num_cached_blocks) {
      MILLRACE_CHECK(block.num_readers > 0, "a cached block counts its readers", slot.block_table[i]);
      --block.num_readers;
    } else {
      MILLRACE_CHECK(block.writer == id, "a writable block has one writer", slot.block_table[i], block.writer, id);
      block.writer = -1;
    }
  }
  if (!IsReady(id)) slot.num_computed_tokens = 0;  // its cached part was never computed
  slot.active = false;
  StopDrafting(id);
  slot.filling_slot = -1;
  slot.token_ids = {};
  slot.all_token_ids = {};
  --num_active_;
}

void SlotTable::Reset() {
  slots_.assign(slots_.size(), {});
  blocks_.assign(blocks_.size(), {});
  num_active_ = num_drafting_ = 0;
  next_order_ = 0;
}

bool SlotTable::IsReady(int32_t id) const {
  const Slot* slot = &at(id);
  for (; slot->filling_slot >= 0; slot = &at(slot->filling_slot)) {
    if (at(slot->filling_slot).num_computed_tokens < slot->num_cached_tokens) return false;
  }
  return !slot->orphaned;
}

}  // namespace millrace
