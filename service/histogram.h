// A distribution of whole numbers (microseconds, tokens) as Prometheus wants it: how many lie at or below each bound.
// Observe takes no lock: two relaxed additions. Any thread. Memory: 8 bytes a bucket; time: O(log buckets).
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace millrace {

class Histogram {
 public:
  // `bounds` ascend, in the unit that is shown; `unit` is what an observed 1 stands for in it: 1e-6 for microseconds
  // shown as seconds.
  Histogram(absl::Span<const double> bounds, double unit);

  void Observe(int64_t value);

  struct Snapshot {
    std::vector<uint64_t> cumulative;  // by bound
    uint64_t count = 0;
    double sum = 0;
  };
  Snapshot Take() const;  // not one instant of all buckets, but never a falling count
  const std::vector<double>& bounds() const { return bounds_; }

 private:
  const std::vector<double> bounds_;
  const double unit_;
  std::vector<int64_t> limits_;                // of observed values, by bound
  std::vector<std::atomic<uint64_t>> counts_;  // by bound, and last those above all
  std::atomic<int64_t> sum_{0};
};

}  // namespace millrace
