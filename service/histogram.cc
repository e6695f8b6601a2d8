#include "service/histogram.h"

#include <algorithm>
#include <cmath>

namespace millrace {

Histogram::Histogram(absl::Span<const double> bounds, double unit)
    : bounds_(bounds.begin(), bounds.end()), unit_(unit), counts_(bounds.size() + 1) {
  limits_.reserve(bounds_.size());
  for (const double bound : bounds_) limits_.push_back(std::llround(bound / unit));
}

void Histogram::Observe(int64_t value) {
  const auto bucket = std::lower_bound(limits_.begin(), limits_.end(), value) - limits_.begin();
  counts_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

Histogram::Snapshot Histogram::Take() const {
  Snapshot snapshot;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    snapshot.count += counts_[i].load(std::memory_order_relaxed);
    snapshot.cumulative.push_back(snapshot.count);
  }
  snapshot.count += counts_.back().load(std::memory_order_relaxed);
  snapshot.sum = static_cast<double>(sum_.load(std::memory_order_relaxed)) * unit_;
  return snapshot;
}

}  // namespace millrace
