#include "tests/cluster/sim/virtual_worker.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "kernels/check.h"
#include "router/schedule/step_cost.h"

namespace millrace {
namespace {

constexpr uint32_t kStepTokens = 8192;

}  // namespace

VirtualWorker::VirtualWorker(const worker::v1::Ready& ready, const worker::v1::StepCost& real,
                             const std::vector<uint32_t>* ends, const Drafting& drafting)
    : ready_(ready), real_(real), ends_(ends), drafting_(drafting), slots_(ready.num_slots()) {}

void VirtualWorker::Apply(const worker::v1::Edit& edit) {
  MILLRACE_CHECK(edit.edit_id() == applied_edit_ + 1, "edits come in order");
  applied_edit_ = edit.edit_id();
  for (const uint32_t id : edit.release()) slots_.at(id) = Slot{};
  for (const worker::v1::Admit& admit : edit.admit()) {
    Slot& slot = slots_.at(admit.slot());
    MILLRACE_CHECK(!slot.live, "a slot is filled when it is empty", admit.slot());
    slot = Slot{};
    slot.live = true;
    slot.serial = ++admissions_;
    slot.rank = admit.rank();
    slot.cached = slot.computed = admit.num_cached_tokens();
    slot.length = admit.num_cached_tokens() + static_cast<uint32_t>(admit.token_ids_size());
    slot.room = static_cast<uint32_t>(admit.block_table_size()) * ready_.block_tokens();
    slot.max_length = admit.max_length();
    slot.seed = admit.sampling().seed();
    MILLRACE_CHECK(slot.room >= slot.length, "a table holds the prompt", admit.slot());
    if (!admit.has_filling_slot()) continue;
    slot.filler = admit.filling_slot();
    slot.filler_serial = slots_.at(admit.filling_slot()).serial;
  }
  for (const worker::v1::Extend& extend : edit.extend()) {
    slots_.at(extend.slot()).room += static_cast<uint32_t>(extend.block_table_size()) * ready_.block_tokens();
  }
  for (const worker::v1::Rank& rank : edit.rank()) slots_.at(rank.slot()).rank = rank.rank();
  for (const worker::v1::Draft& draft : edit.draft()) {
    if (!slots_.at(draft.slot()).live) continue;  // it has just ended by itself
    slots_[draft.slot()].draft = draft.length();
    num_drafts_told_ += draft.length() > 0;
  }
}

bool VirtualWorker::Waits(const Slot& slot) const {
  if (slot.filler < 0) return false;
  const Slot& filler = slots_[static_cast<size_t>(slot.filler)];
  return filler.live && filler.serial == slot.filler_serial && filler.computed < slot.cached;
}

// Tokens after `start` whose prefill takes so long: the root of PrefillSeconds.
uint32_t VirtualWorker::Fits(double seconds, uint32_t start) const {
  const double half = ready_.step_cost().prefill_context_ns() * 1e-9 / 2;
  const double linear = ready_.step_cost().prefill_token_us() * 1e-6 + 2 * half * start;
  const double tokens = half == 0
                            ? seconds / linear
                            : (std::sqrt(linear * linear + 4 * half * std::max(seconds, 0.0)) - linear) / 2 / half;
  return static_cast<uint32_t>(std::clamp(tokens, 0.0, 1.0 * kStepTokens));
}

uint32_t VirtualWorker::Drafts(const Slot& slot) const {
  const uint32_t wanted = drafting_.fixed >= 0 ? static_cast<uint32_t>(drafting_.fixed) : slot.draft;
  return std::min({wanted, slot.room - slot.length, slot.max_length - slot.length - 1});
}

bool VirtualWorker::Right(const Slot& slot) const {
  uint64_t x = (slot.seed * 0x2545f4914f6cdd1d + slot.length) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9;
  return static_cast<double>((x ^ x >> 32) >> 11) * 0x1p-53 < drafting_.accuracy;
}

Time VirtualWorker::Begin() {
  chunks_.clear();
  report_ = {};
  report_.set_step(++step_);
  report_.set_applied_edit(applied_edit_);
  std::vector<uint32_t> prefills;
  uint32_t rows = 0;
  uint64_t context = 0;
  uint32_t depth = 0;
  double draft_us = 0;
  for (uint32_t id = 0; id < slots_.size(); ++id) {
    const Slot& slot = slots_[id];
    if (!slot.live) continue;
    if (!slot.decoding) {
      if (!Waits(slot)) prefills.push_back(id);
    } else if (slot.length <= slot.room) {
      const uint32_t drafts = Drafts(slot);
      chunks_.push_back({id, 0, drafts});
      rows += 1 + drafts;
      context += slot.length;
      if (drafts == 0) continue;
      const worker::v1::Drafter& drafter = ready_.drafters(0);
      depth = std::max(depth, drafts);
      draft_us += drafts * (drafter.row_us() + slot.length * drafter.context_ns() / 1000);
    } else {
      report_.add_stalled_slots(id);
    }
  }
  std::sort(prefills.begin(), prefills.end(), [&](uint32_t a, uint32_t b) {
    return std::tie(slots_[a].rank, slots_[a].serial) < std::tie(slots_[b].rank, slots_[b].serial);
  });
  const worker::v1::StepCost& cost = ready_.step_cost();
  double left = ready_.step_target_us() * 1e-6 - DecodeSeconds(cost, rows, static_cast<double>(context));
  left = std::max(left, cost.step_us() * 1e-6);
  double seconds = 0;
  uint32_t tokens = 0;
  uint64_t before = 0;
  for (const uint32_t id : prefills) {
    const Slot& slot = slots_[id];
    uint32_t n = std::min(slot.length - slot.computed, kStepTokens - tokens);
    if (rows > 0) n = std::min(n, std::max(Fits(left, slot.computed), tokens == 0 ? 1u : 0u));
    if (n == 0) break;
    left -= PrefillSeconds(cost, slot.computed, n);
    seconds += PrefillSeconds(real_, slot.computed, n);
    tokens += n;
    before += uint64_t{n} * slot.computed + uint64_t{n} * (n - 1) / 2;
    chunks_.push_back({id, n, 0});
  }
  duration_ = 0;
  if (chunks_.empty()) return 0;
  duration_ = std::max<Time>(1, std::llround(1e6 * StepSeconds(real_, seconds, rows, static_cast<double>(context))));
  if (depth > 0) draft_us += depth * ready_.drafters(0).step_us();
  duration_ += std::llround(draft_us);
  report_.set_draft_us(static_cast<uint32_t>(std::llround(draft_us)));
  report_.set_step_us(static_cast<uint32_t>(duration_));
  report_.set_decode_rows(rows);
  report_.set_decode_context(context);
  report_.set_prefill_tokens(tokens);
  report_.set_prefill_context(before);
  return duration_;
}

void VirtualWorker::Sample(uint32_t id, uint32_t drafts, worker::v1::StepReport* report) {
  Slot& slot = slots_[id];
  slot.decoding = true;
  worker::v1::Row* row = report->add_rows();
  row->set_slot(id);
  row->set_num_drafted(drafts);
  for (uint32_t i = 0; i <= drafts; ++i) {
    const bool right = Right(slot);
    ++slot.length;
    row->add_token_ids(1);
    if (slot.length == slot.max_length) {
      row->set_finish_reason(worker::v1::FINISH_REASON_LENGTH);
    } else if (slot.length >= ends_->at(slot.seed)) {
      row->set_finish_reason(worker::v1::FINISH_REASON_STOP_TOKEN);
    } else if (right) {
      continue;
    }
    break;
  }
  if (row->finish_reason() != worker::v1::FINISH_REASON_UNSPECIFIED) slot = Slot{};
}

worker::v1::StepReport VirtualWorker::End() {
  for (const Chunk& chunk : chunks_) {
    Slot& slot = slots_[chunk.slot];
    if (chunk.tokens == 0) {
      slot.computed = slot.length;
      Sample(chunk.slot, chunk.drafts, &report_);
      continue;
    }
    slot.computed += chunk.tokens;
    worker::v1::Progress* progress = report_.add_prefill();
    progress->set_slot(chunk.slot);
    progress->set_num_computed_tokens(slot.computed);
    if (slot.computed == slot.length) Sample(chunk.slot, 0, &report_);
  }
  duration_ = 0;
  return std::move(report_);
}

worker::v1::StepReport VirtualWorker::Heartbeat() const {
  worker::v1::StepReport report;
  report.set_step(step_);
  report.set_applied_edit(applied_edit_);
  return report;
}

}  // namespace millrace
