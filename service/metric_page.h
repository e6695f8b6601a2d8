// What one scrape returns: series, grouped by name, written by those who know the figures. Made for each scrape, by the
// thread that serves it. The same name keeps its type and its help.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "prometheus/metric_family.h"
#include "service/histogram.h"

namespace millrace {

class MetricPage {
 public:
  using Labels = std::vector<std::pair<std::string, std::string>>;

  void AddCounter(absl::string_view name, absl::string_view help, double value, const Labels& labels = {});
  void AddGauge(absl::string_view name, absl::string_view help, double value, const Labels& labels = {});
  void AddHistogram(absl::string_view name, absl::string_view help, const Histogram& histogram,
                    const Labels& labels = {});

  std::vector<prometheus::MetricFamily> Take() { return std::move(families_); }

 private:
  prometheus::ClientMetric& Add(absl::string_view name, absl::string_view help, prometheus::MetricType type,
                                const Labels& labels);

  std::vector<prometheus::MetricFamily> families_;
  absl::flat_hash_map<std::string, size_t> places_;  // by name
};

}  // namespace millrace
