// From the queue to workers.
#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/schedule/scheduler_state.h"

namespace millrace {
namespace {

constexpr size_t kWindow = 32;  // sequences that a dispatch looks at, in order

}  // namespace

void Scheduler::State::FindPrefix(Sequence* sequence) {
  const Matched wanted{sequence->id, sequence->length(), index->changes(), workers.size()};
  if (matched == wanted) return;
  matched = wanted;
  hasher.Extend(sequence->hashes, sequence->root, sequence->tokens, block_tokens);
  index->Find(sequence->root, sequence->hashes, sequence->tokens.data(), workers.size(), &match);
}

double Scheduler::State::PrefillLeft(const RunningSet& set, const Sequence& sequence, uint32_t depth) const {
  const double cached = static_cast<double>(set.UsableBlocks(sequence, depth)) * block_tokens;
  return PrefillSeconds(set.cost(), cached, sequence.length() - cached);
}

void Scheduler::State::Dispatch(Time now) {
  ExpireDeadlines(now);
  while (queue.size() > 0 && DispatchFirst(now) > 0) {
  }
  DecideDrafts();
}

RunningSet& Scheduler::State::Change(uint32_t place) {
  changed.push_back(place);
  return *workers[place].set;
}

// Only where something may have changed: with a thousand workers, looking at each costs more than a report.
void Scheduler::State::DecideDrafts() {
  const bool others_wait = queue.size() > 0;
  if (std::exchange(drafts_yield, others_wait) != others_wait) {
    changed.resize(workers.size());
    std::iota(changed.begin(), changed.end(), 0);
  }
  for (const uint32_t place : changed) {
    if (workers[place].set != nullptr) workers[place].set->DecideDrafts(others_wait);
  }
  changed.clear();
}

// Returns how many of the first in the queue were admitted.
int Scheduler::State::DispatchFirst(Time now) {
  candidates.assign(workers.size(), {});
  bool any_open = false;
  for (size_t place = 0; place < workers.size(); ++place) {
    candidates[place].open = workers[place].set != nullptr && workers[place].set->open();
    if (candidates[place].open) workers[place].set->RefreshRanks(now);
    any_open |= candidates[place].open;
  }
  if (!any_open) return 0;
  queue.Refresh(now);
  queue.First(kWindow, &first);
  int admitted = 0;
  for (Sequence* sequence : first) {
    const Outcome outcome = Place(sequence, now);
    if (outcome == Outcome::kAllBusy) break;
    admitted += outcome == Outcome::kAdmitted;
  }
  return admitted;
}

Scheduler::State::Outcome Scheduler::State::Place(Sequence* sequence, Time now) {
  if (!MayRun(*sequence)) return Outcome::kWaits;
  const double ahead = static_cast<double>(options.max_prefill_ahead) * 1e-6;
  FindPrefix(sequence);
  absl::InlinedVector<uint32_t, 16> full;  // do not have the blocks now
  for (;;) {
    uint32_t best = kNone;
    double best_cost = 0, best_own = 0, best_wait = 0, best_seconds = 0, best_decode = 0, least_wait = 0, least_own = 0;
    bool any_open = false;
    for (uint32_t place = 0; place < workers.size(); ++place) {
      if (!candidates[place].open) continue;
      const RunningSet& set = *workers[place].set;
      if (sequence->max_length > set.pool_tokens()) continue;
      const double own = PrefillLeft(set, *sequence, match.depth[place]);
      WorkerLoad load = set.Load(PrefillRank(*sequence, own, now), expected_output);
      load.wait += candidates[place].promised;
      least_wait = any_open ? std::min(least_wait, load.wait) : load.wait;
      least_own = any_open ? std::min(least_own, own) : own;
      any_open = true;
      if (std::find(full.begin(), full.end(), place) != full.end()) continue;
      const double cost = PlacementCost(load, own, sequence->length());
      if (best != kNone && cost >= best_cost) continue;
      best = place;
      best_cost = cost;
      best_own = own;
      best_wait = load.wait;
      best_seconds = AnswerSeconds(load, own, expected_output / 2);
      best_decode = DecodeSeconds(load, expected_output / 2);
    }
    if (best == kNone) {
      // Nowhere: the cheapest worker is kept for it, so that smaller ones behind cannot take its blocks for ever.
      if (!full.empty()) candidates[full.front()].open = false;
      const bool open = std::any_of(candidates.begin(), candidates.end(), [](const Candidate& it) { return it.open; });
      return open ? Outcome::kWaits : Outcome::kAllBusy;
    }
    if (best_wait > 0 && best_wait >= ahead) {
      candidates[best].promised += best_own;
      sequence->left = least_own;
      queue.Update(sequence, now);
      return least_wait >= ahead ? Outcome::kAllBusy : Outcome::kWaits;
    }
    if (!sequence->returned && Misses(*sequence, best_seconds, now) && workers[best].set->cost_is_measured()) {
      Detach(sequence, now);
      ++counts.shed;
      Fail(sequence, Busy(absl::StrCat("its answer takes ", static_cast<int64_t>(best_seconds * 1000),
                                       " ms; its deadline is in ", (sequence->deadline - now) / 1000, " ms")));
      return Outcome::kWaits;
    }
    if (Change(best).Admit(sequence, match, now)) {
      if (sequence->deadline != kNever) sequence->first_due = sequence->deadline - static_cast<Time>(best_decode * 1e6);
      queue.Remove(sequence);
      Admitted(sequence, now);
      workers[best].set->RefreshRanks(now);
      candidates[best].open = workers[best].set->open();
      return Outcome::kAdmitted;
    }
    full.push_back(best);
  }
}

void Scheduler::State::Admitted(Sequence* sequence, Time now) {
  sequence->place = Sequence::Place::kRunning;
  ++counts.running;
  if (IsSuspect(*sequence)) on_trial = sequence->id;
  const RunningSet& set = *workers[sequence->worker].set;
  SequenceReport& report = sequence->report;
  report.worker = set.id();
  if (report.admitted != 0) return;
  report.admitted = now;
  report.cached_tokens = static_cast<int32_t>(set.slots()[sequence->slot].num_cached * block_tokens);
  report.predicted_cached_tokens =
      static_cast<int32_t>(set.UsableBlocks(*sequence, match.depth[sequence->worker]) * block_tokens);
  counts.cached_tokens += static_cast<uint64_t>(report.cached_tokens);
  queue.Charge(*sequence, sequence->length() - report.cached_tokens, true);
}

}  // namespace millrace
