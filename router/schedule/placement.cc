#include "router/schedule/placement.h"

#include <algorithm>

namespace millrace {
namespace {

constexpr int64_t kPriorityStep = int64_t{1} << 47;  // above every key: 2^47 ns are 39 hours
constexpr double kExpectedOutput = 350;              // tokens
constexpr double kOwnWeight = 1.0;                   // work that a hit saves counts beside the time that it takes
constexpr double kDelayWeight = 0.05;                // of seconds that others lose

}  // namespace

int64_t PrefillRank(const Sequence& sequence, double left, Time now) {
  const int64_t priority = std::clamp(sequence.priority, -32768, 32767);
  double key = 0;
  if (!sequence.returned) {
    const double waited = static_cast<double>(now - sequence.report.submitted) * 1e-6;
    key = std::min(left / (1 + waited / sequence.limit) * 1e9 + 1, static_cast<double>(kPriorityStep - 1));
  }
  return -priority * kPriorityStep + static_cast<int64_t>(key);
}

double PlacementCost(const WorkerLoad& worker, double own, double tokens) {
  const double rows = DecodeSeconds(*worker.cost, worker.rows, worker.context);
  const double share = std::min(rows / worker.step_target, 0.95);
  const double slow = 1 / (1 - share);
  const double others = worker.rows + worker.prefills;
  const double delay =
      own * others + kExpectedOutput * (DecodeSeconds(*worker.cost, 2 * others, worker.context + others * tokens));
  return (worker.wait + own) * slow + kOwnWeight * own + kDelayWeight * delay;
}

}  // namespace millrace
