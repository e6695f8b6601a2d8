// A worker made of arithmetic: it keeps to the wire contract strictly, checks every edit as a real one would, and
// computes "tokens" that depend on everything before them, read through its block table. So a block that does not hold
// what the router believes changes the output. One per stream, single-threaded, deterministic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "millrace/worker/v1/worker.pb.h"

namespace millrace {

// The k and v of a position: a function of all tokens up to it.
inline uint64_t NextKv(uint64_t before, int32_t token) {
  uint64_t x = (before + static_cast<uint64_t>(token) + 1) * 0x9e3779b97f4a7c15;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9;
  return x ^ (x >> 32);
}

struct SimulatedModel {
  int32_t vocab = 97;
  uint32_t max_context = 4096;
  uint64_t non_finite_one_in = 0;  // 0: never

  // The token after a position; none: its logits are not finite.
  std::optional<int32_t> Sample(uint64_t kv, uint64_t seed) const {
    const uint64_t x = NextKv(kv ^ seed * 0x2545f4914f6cdd1d, 7);
    if (non_finite_one_in != 0 && x % non_finite_one_in == 0) return std::nullopt;
    return static_cast<int32_t>((x >> 20) % static_cast<uint64_t>(vocab));
  }
};

class SimulatedWorker {
 public:
  SimulatedWorker(const SimulatedModel& model, uint32_t num_blocks, uint32_t block_tokens, uint32_t num_slots,
                  uint32_t chunk)
      : model_(model),
        block_tokens_(block_tokens),
        chunk_(chunk),
        kv_(size_t{num_blocks} * block_tokens, kUnwritten),
        holders_(num_blocks, 0),
        writer_(num_blocks, -1),
        slots_(num_slots) {}

  worker::v1::Ready Ready() const {
    worker::v1::Ready ready;
    ready.mutable_model()->set_name("simulated");
    ready.mutable_model()->set_vocab_size(static_cast<uint32_t>(model_.vocab));
    ready.mutable_model()->set_max_context(model_.max_context);
    ready.set_num_blocks(num_blocks());
    ready.set_block_tokens(block_tokens_);
    ready.set_num_slots(static_cast<uint32_t>(slots_.size()));
    ready.set_step_target_us(45'000);
    ready.mutable_step_cost()->set_step_us(5000);
    ready.mutable_step_cost()->set_prefill_token_us(500);
    ready.mutable_step_cost()->set_prefill_context_ns(100);
    ready.mutable_step_cost()->set_row_us(50);
    ready.mutable_step_cost()->set_context_ns(10);
    for (const auto method : {worker::v1::DRAFT_METHOD_LOOKUP, worker::v1::DRAFT_METHOD_MODEL}) {
      worker::v1::Drafter* drafter = ready.add_drafters();
      drafter->set_method(method);
      drafter->set_max_length(kMaxDrafts);
      drafter->set_row_us(5);
    }
    ready.mutable_drafters(1)->set_step_us(300);
    return ready;
  }
  uint64_t num_drafted() const { return num_drafted_; }
  uint32_t num_blocks() const { return static_cast<uint32_t>(holders_.size()); }
  bool idle() const {
    return std::none_of(slots_.begin(), slots_.end(), [](const RunningSlot& slot) { return slot.live; });
  }

  void Apply(const worker::v1::Edit& edit) {
    ASSERT_EQ(edit.edit_id(), applied_edit_ + 1);
    applied_edit_ = edit.edit_id();
    for (const uint32_t id : edit.release()) {
      ASSERT_LT(id, slots_.size());
      if (slots_[id].live) Empty(id);
    }
    for (const auto& admit : edit.admit()) {
      Admit(admit);
      if (testing::Test::HasFatalFailure()) return;
    }
    for (const auto& extend : edit.extend()) {
      ASSERT_LT(extend.slot(), slots_.size());
      RunningSlot& slot = slots_[extend.slot()];
      ASSERT_GT(extend.block_table_size(), 0);
      if (!slot.live) continue;  // it has just ended by itself
      for (const uint32_t block : extend.block_table()) AddWritable(extend.slot(), block);
    }
    for (const auto& rank : edit.rank()) {
      ASSERT_LT(rank.slot(), slots_.size());
      slots_[rank.slot()].rank = rank.rank();
    }
    for (const auto& draft : edit.draft()) {
      ASSERT_LT(draft.slot(), slots_.size());
      ASSERT_LE(draft.length(), kMaxDrafts);
      ASSERT_EQ(draft.length() == 0, draft.method() == worker::v1::DRAFT_METHOD_UNSPECIFIED);
      if (slots_[draft.slot()].live) slots_[draft.slot()].drafts = draft.length();
    }
    for (const RunningSlot& slot : slots_) {
      if (!slot.live) continue;
      ASSERT_TRUE(edit.admit_size() == 0 || slot.drafts == 0) << "a slot drafts while another prefills";
      if (slot.filler < 0) continue;
      const RunningSlot& filler = slots_[static_cast<size_t>(slot.filler)];
      ASSERT_TRUE(filler.live && filler.serial == slot.filler_serial) << "a slot waits for one that was released";
    }
  }

  // One step. `right` says whether the next guess of a slot that drafts is.
  worker::v1::StepReport Step(const std::function<bool()>& right) {
    worker::v1::StepReport report;
    report.set_step(++step_);
    report.set_applied_edit(applied_edit_);
    report.set_step_us(1000);
    std::vector<uint32_t> decoding, prefilling;
    for (uint32_t id = 0; id < slots_.size(); ++id) {
      const RunningSlot& slot = slots_[id];
      if (!slot.live || slot.filler >= 0) continue;
      (slot.computed + 1 == slot.length() && slot.sampled ? decoding : prefilling).push_back(id);
    }
    std::stable_sort(prefilling.begin(), prefilling.end(), [&](uint32_t a, uint32_t b) {
      return std::make_pair(slots_[a].rank, slots_[a].serial) < std::make_pair(slots_[b].rank, slots_[b].serial);
    });
    for (const uint32_t id : decoding) Decode(id, right, &report);
    uint32_t left = chunk_;
    for (const uint32_t id : prefilling) {
      if (left == 0) break;
      left -= Prefill(id, left, &report);
    }
    Wake();
    return report;
  }

 private:
  static constexpr uint64_t kUnwritten = 0;
  static constexpr uint32_t kMaxDrafts = 6;

  struct RunningSlot {
    bool live = false;
    bool sampled = false;  // it has got a token here, so it decodes
    uint64_t serial = 0;
    int64_t rank = 0;
    int filler = -1;
    uint64_t filler_serial = 0;
    uint32_t cached = 0;
    uint32_t computed = 0;
    uint32_t drafts = 0;          // that it was told to make in a step
    std::vector<int32_t> tokens;  // from `cached` on
    std::vector<uint32_t> table;
    worker::v1::Admit admit;
    uint32_t length() const { return cached + static_cast<uint32_t>(tokens.size()); }
  };

  void Admit(const worker::v1::Admit& admit) {
    ASSERT_LT(admit.slot(), slots_.size());
    RunningSlot& slot = slots_[admit.slot()];
    ASSERT_FALSE(slot.live) << "slot " << admit.slot();
    ASSERT_EQ(admit.num_cached_tokens() % block_tokens_, 0u);
    ASSERT_GE(admit.token_ids_size(), 1);
    const uint32_t length = admit.num_cached_tokens() + static_cast<uint32_t>(admit.token_ids_size());
    ASSERT_GE(static_cast<uint32_t>(admit.block_table_size()) * block_tokens_, length);
    ASSERT_LT(length, admit.max_length());
    ASSERT_LE(admit.max_length(), model_.max_context);
    ASSERT_LE(admit.num_prompt_tokens(), length);
    if (admit.sampling().has_prompt_logprobs()) {
      ASSERT_EQ(admit.num_cached_tokens(), 0u);
      ASSERT_EQ(admit.num_prompt_tokens(), length);
    }
    const bool penalty = admit.sampling().repetition_penalty() != 1 || admit.sampling().presence_penalty() != 0 ||
                         admit.sampling().frequency_penalty() != 0;
    ASSERT_EQ(static_cast<uint32_t>(admit.cached_token_ids_size()), penalty ? admit.num_cached_tokens() : 0u);
    slot = RunningSlot{};
    slot.live = true;
    slot.serial = ++admissions_;
    slot.rank = admit.rank();
    slot.cached = slot.computed = admit.num_cached_tokens();
    slot.tokens.assign(admit.token_ids().begin(), admit.token_ids().end());
    slot.admit = admit;
    if (admit.has_filling_slot()) {
      ASSERT_LT(admit.filling_slot(), slots_.size());
      ASSERT_NE(admit.filling_slot(), admit.slot());
      const RunningSlot& filler = slots_[admit.filling_slot()];
      if (filler.live && filler.computed < slot.cached) {
        slot.filler = static_cast<int>(admit.filling_slot());
        slot.filler_serial = filler.serial;
      }
    }
    for (int i = 0; i < admit.block_table_size(); ++i) {
      const uint32_t block = admit.block_table(i);
      ASSERT_LT(block, num_blocks());
      if (static_cast<uint32_t>(i) < slot.cached / block_tokens_) {
        ++holders_[block];
        slot.table.push_back(block);
      } else {
        AddWritable(admit.slot(), block);
      }
    }
  }

  void AddWritable(uint32_t id, uint32_t block) {
    ASSERT_LT(block, num_blocks());
    ASSERT_EQ(holders_[block], 0) << "block " << block << " is given to slot " << id << " while another holds it";
    ASSERT_EQ(writer_[block], -1) << "block " << block << " has two writers";
    writer_[block] = static_cast<int>(id);
    ++holders_[block];
    slots_[id].table.push_back(block);
    std::fill_n(kv_.begin() + static_cast<ptrdiff_t>(size_t{block} * block_tokens_), block_tokens_, kUnwritten);
  }

  void Empty(uint32_t id) {
    for (const uint32_t block : slots_[id].table) {
      --holders_[block];
      if (writer_[block] == static_cast<int>(id)) writer_[block] = -1;
    }
    slots_[id].live = false;
  }

  // Those whose filler has come far enough, or has ended by itself.
  void Wake() {
    for (RunningSlot& slot : slots_) {
      if (!slot.live || slot.filler < 0) continue;
      const RunningSlot& filler = slots_[static_cast<size_t>(slot.filler)];
      if (!filler.live || filler.serial != slot.filler_serial || filler.computed >= slot.cached) slot.filler = -1;
    }
  }

  uint64_t& Kv(RunningSlot& slot, uint32_t position) {
    return kv_[size_t{slot.table[position / block_tokens_]} * block_tokens_ + position % block_tokens_];
  }
  uint64_t Compute(RunningSlot& slot) {
    const uint32_t position = slot.computed++;
    const uint64_t before = position == 0 ? 1 : Kv(slot, position - 1);
    if (before == kUnwritten) ADD_FAILURE() << "position " << position - 1 << " is read before it was written";
    return Kv(slot, position) = NextKv(before, slot.tokens[position - slot.cached]);
  }

  // True if the sequence goes on.
  bool Accept(uint32_t id, uint64_t kv, worker::v1::Row* row) {
    RunningSlot& slot = slots_[id];
    const std::optional<int32_t> token = model_.Sample(kv, slot.admit.sampling().seed());
    if (!token.has_value()) {
      row->set_finish_reason(worker::v1::FINISH_REASON_NON_FINITE);
      return false;
    }
    slot.tokens.push_back(*token);
    slot.sampled = true;
    row->add_token_ids(*token);
    if (slot.admit.sampling().has_logprobs()) row->add_logprobs()->set_token_id(*token);
    const auto& stops = slot.admit.stop_token_ids();
    if (slot.length() > slot.admit.min_length() && std::find(stops.begin(), stops.end(), *token) != stops.end()) {
      row->set_finish_reason(worker::v1::FINISH_REASON_STOP_TOKEN);
    } else if (slot.length() == slot.admit.max_length()) {
      row->set_finish_reason(worker::v1::FINISH_REASON_LENGTH);
    }
    return row->finish_reason() == worker::v1::FINISH_REASON_UNSPECIFIED;
  }

  // Drafts as many tokens as it was told, as far as its table and its longest length have room.
  void Decode(uint32_t id, const std::function<bool()>& right, worker::v1::StepReport* report) {
    RunningSlot& slot = slots_[id];
    worker::v1::Row row;
    row.set_slot(id);
    const auto room = static_cast<uint32_t>(slot.table.size()) * block_tokens_ + 1;
    const uint32_t most = std::min(room, slot.admit.max_length());
    if (slot.length() < most) row.set_num_drafted(std::min(slot.drafts, most - slot.length() - 1));
    bool goes_on = true;
    for (uint32_t i = 0; goes_on && slot.length() < most && i <= row.num_drafted(); ++i) {
      goes_on = Accept(id, Compute(slot), &row);
      if (i < row.num_drafted() && !right()) break;
    }
    num_drafted_ += row.num_drafted();
    if (row.token_ids_size() > 0 || !goes_on) {
      *report->add_rows() = row;
    } else {
      report->add_stalled_slots(id);
    }
    if (!goes_on) Empty(id);
  }

  uint32_t Prefill(uint32_t id, uint32_t budget, worker::v1::StepReport* report) {
    RunningSlot& slot = slots_[id];
    const uint32_t n = std::min(budget, slot.length() - slot.computed);
    worker::v1::Progress* progress = report->add_prefill();
    progress->set_slot(id);
    uint64_t kv = 0;
    for (uint32_t i = 0; i < n; ++i) {
      if (slot.admit.sampling().has_prompt_logprobs() && slot.computed > 0) {
        progress->add_prompt_logprobs()->set_token_id(slot.tokens[slot.computed]);
      }
      kv = Compute(slot);
    }
    progress->set_num_computed_tokens(slot.computed);
    if (slot.computed < slot.length()) return n;
    worker::v1::Row* row = report->add_rows();
    row->set_slot(id);
    if (!Accept(id, kv, row)) Empty(id);
    return n;
  }

  const SimulatedModel model_;
  const uint32_t block_tokens_;
  const uint32_t chunk_;
  std::vector<uint64_t> kv_;
  std::vector<int> holders_;  // by block: tables that hold it
  std::vector<int> writer_;   // by block: the slot that may write it
  std::vector<RunningSlot> slots_;
  uint64_t applied_edit_ = 0;
  uint64_t step_ = 0;
  uint64_t admissions_ = 0;
  uint64_t num_drafted_ = 0;
};

}  // namespace millrace
