#include "router/schedule/placement.h"

#include <algorithm>

namespace millrace {
namespace {

constexpr int64_t kPriorityStep = int64_t{1} << 47;  // above every key: 2^47 ns are 39 hours
constexpr double kOwnWeight = 1.0;                   // work that a hit saves counts beside the time that it takes
constexpr double kLateFactor = 16;                   // what comes too late anyway yields to what can be in time
constexpr double kDelayWeight = 0.05;                // of seconds that others lose
constexpr double kUrgentStretch = 2;                 // of the prefill that is left, by the rows that decode there
constexpr double kUrgentSeconds = 0.25;              // and a few steps that are under way

}  // namespace

int64_t PrefillRank(const Sequence& sequence, double left, Time now) {
  const int64_t priority = std::clamp(sequence.priority, -32768, 32767);
  double key = 0;
  if (!sequence.returned && !IsUrgent(sequence, left, now)) {
    const double waited = static_cast<double>(now - sequence.report.submitted) * 1e-6;
    const double late = IsLate(sequence, left, now) ? kLateFactor : 1;
    key = std::min(late * left / (1 + waited / sequence.limit) * 1e9 + 1, static_cast<double>(kPriorityStep - 1));
  }
  return -priority * kPriorityStep + static_cast<int64_t>(key);
}

bool IsLate(const Sequence& sequence, double left, Time now) {
  return static_cast<double>(now - sequence.report.submitted) * 1e-6 + left > sequence.limit;
}

bool IsUrgent(const Sequence& sequence, double left, Time now) {
  return sequence.first_due != kNever && static_cast<double>(now) + (kUrgentStretch * left + kUrgentSeconds) * 1e6 >=
                                             static_cast<double>(sequence.first_due);
}

double Slowdown(const WorkerLoad& worker) {
  const double rows = DecodeSeconds(*worker.cost, worker.rows, worker.context);
  return 1 / (1 - std::min(rows / worker.step_target, 0.95));
}

double DecodeSeconds(const WorkerLoad& worker, double tokens) {
  const double alone = StepSeconds(*worker.cost, 0, worker.rows + 1, worker.context);
  const double step = worker.prefills > 0 || worker.wait > 0 ? std::max(worker.step_target, alone) : alone;
  return tokens * step;
}

double AnswerSeconds(const WorkerLoad& worker, double own, double tokens) {
  return (worker.wait + own) * Slowdown(worker) + DecodeSeconds(worker, tokens);
}

double PlacementCost(const WorkerLoad& worker, double own, double tokens) {
  const double others = worker.rows + worker.prefills;
  const double delay =
      own * others + worker.output * (DecodeSeconds(*worker.cost, 2 * others, worker.context + others * tokens));
  return (worker.wait + own) * Slowdown(worker) + kOwnWeight * own + kDelayWeight * delay;
}

}  // namespace millrace
