// Calls that were not allowed: counted by reason, and logged once a minute for each reason, peer and service. Any
// thread. What a peer sends of secrets never comes here.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "service/metric_page.h"
#include "service/once_a_minute.h"

namespace millrace {

class Refusals {
 public:
  enum Reason { kNoToken, kWrongToken, kNotAdmin, kWrongRole, kNumReasons };

  // `method` is /SERVICE/METHOD, `peer` whatever is known of it.
  void Add(Reason reason, absl::string_view method, absl::string_view peer);
  void Fill(MetricPage* page) const;

 private:
  std::array<std::atomic<uint64_t>, kNumReasons> counts_{};
  OnceAMinute said_;
};

}  // namespace millrace
