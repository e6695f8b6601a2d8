// What the queue takes, and what it gives up: deadlines that cannot be met, and room.
#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "router/schedule/scheduler_state.h"

namespace millrace {
namespace {

constexpr double kLeastRetry = 0.1, kMostRetry = 30;  // seconds

}  // namespace

// Tries again when about half of what waits now will have been served.
absl::Status Scheduler::State::Busy(std::string message) const {
  double seconds = 0;
  for (const Sequence* sequence : queue.all()) seconds += sequence->left;
  seconds /= 2 * static_cast<double>(std::max<size_t>(places.size(), 1));
  absl::Status status = absl::ResourceExhaustedError(std::move(message));
  const double wait = std::clamp(seconds, kLeastRetry, kMostRetry);
  status.SetPayload(kRetryAfterMs, absl::Cord(absl::StrCat(static_cast<int64_t>(wait * 1000))));
  return status;
}

bool Scheduler::State::Misses(const Sequence& sequence, double seconds, Time now) const {
  return sequence.deadline != kNever &&
         static_cast<double>(now) + seconds * 1e6 > static_cast<double>(sequence.deadline);
}

// Refuses what could not even get half of the usual answer in time. Only measured costs are trusted with that.
absl::Status Scheduler::State::CheckDeadline(Sequence* sequence, Time now) {
  if (sequence->deadline == kNever || sequence->deadline <= now) return absl::OkStatus();
  Predict(sequence);
  sequence->queue_rank = PrefillRank(*sequence, sequence->left, now);
  double best = 0, slow = 0;
  int num_workers = 0;
  for (size_t place = 0; place < workers.size(); ++place) {
    if (workers[place].set == nullptr || workers[place].set->draining()) continue;
    const RunningSet& set = *workers[place].set;
    if (!set.cost_is_measured()) return absl::OkStatus();
    const WorkerLoad load = set.Load(sequence->queue_rank, expected_output);
    const double seconds = AnswerSeconds(load, PrefillLeft(set, *sequence, match.depth[place]), expected_output / 2);
    best = num_workers == 0 ? seconds : std::min(best, seconds);
    slow += Slowdown(load);
    ++num_workers;
  }
  if (num_workers == 0) return absl::OkStatus();
  const double seconds = best + queue.SecondsBefore(*sequence) * slow / num_workers / num_workers;
  if (!Misses(*sequence, seconds, now)) return absl::OkStatus();
  return Busy(absl::StrCat("its answer is expected in ", static_cast<int64_t>(seconds * 1000),
                           " ms; its deadline is in ", (sequence->deadline - now) / 1000, " ms"));
}

// A full queue gives up the heaviest of what waits, but for nothing that is heavier, and not what goes before it.
absl::Status Scheduler::State::MakeRoom(const Sequences& comers, Time now) {
  if (comers.empty()) return absl::OkStatus();
  const Sequence& comer = *comers.front();
  int64_t tokens = 0;
  for (const auto& sequence : comers) tokens += sequence->length();
  const auto num_comers = static_cast<int64_t>(comers.size());
  for (;;) {
    const int64_t queued = static_cast<int64_t>(queue.size()) + num_comers;
    const bool too_many = queued > options.max_queued_sequences;
    if (!too_many && queue.tokens() + tokens <= options.max_queued_tokens) return absl::OkStatus();
    Sequence* const heaviest =
        num_comers > options.max_queued_sequences || tokens > options.max_queued_tokens ? nullptr : queue.Heaviest(now);
    const bool yields = heaviest != nullptr && heaviest->priority <= comer.priority &&
                        (heaviest->tenant == comer.tenant
                             ? heaviest->priority < comer.priority || IsLate(*heaviest, heaviest->left, now) ||
                                   heaviest->length() > comer.length()
                             : queue.TokensOf(heaviest->tenant) > queue.TokensOf(comer.tenant) + tokens);
    if (!yields) {
      return Busy(too_many ? absl::StrCat("the queue would hold ", queued, " sequences; its limit is ",
                                          options.max_queued_sequences)
                           : absl::StrCat("the queue would hold ", queue.tokens() + tokens,
                                          " prompt tokens; its limit is ", options.max_queued_tokens));
    }
    Detach(heaviest, now);
    ++counts.shed;
    Fail(heaviest, Busy(absl::StrCat("the queue is full and ", heaviest->length(),
                                     " tokens are the most that a sequence in it has")));
  }
}

}  // namespace millrace
