#include "service/metric_page.h"

#include <limits>

namespace millrace {

prometheus::ClientMetric& MetricPage::Add(absl::string_view name, absl::string_view help, prometheus::MetricType type,
                                          const Labels& labels) {
  const auto [place, is_new] = places_.try_emplace(std::string(name), families_.size());
  if (is_new) families_.push_back({std::string(name), std::string(help), type, {}});
  prometheus::ClientMetric& metric = families_[place->second].metric.emplace_back();
  for (const auto& [label, value] : labels) metric.label.push_back({label, value});
  return metric;
}

void MetricPage::AddCounter(absl::string_view name, absl::string_view help, double value, const Labels& labels) {
  Add(name, help, prometheus::MetricType::Counter, labels).counter.value = value;
}

void MetricPage::AddGauge(absl::string_view name, absl::string_view help, double value, const Labels& labels) {
  Add(name, help, prometheus::MetricType::Gauge, labels).gauge.value = value;
}

void MetricPage::AddHistogram(absl::string_view name, absl::string_view help, const Histogram& histogram,
                              const Labels& labels) {
  const Histogram::Snapshot snapshot = histogram.Take();
  prometheus::ClientMetric::Histogram& out = Add(name, help, prometheus::MetricType::Histogram, labels).histogram;
  out.sample_count = snapshot.count;
  out.sample_sum = snapshot.sum;
  for (size_t i = 0; i < snapshot.cumulative.size(); ++i) {
    out.bucket.push_back({snapshot.cumulative[i], histogram.bounds()[i]});
  }
  out.bucket.push_back({snapshot.count, std::numeric_limits<double>::infinity()});
}

}  // namespace millrace
