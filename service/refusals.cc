#include "service/refusals.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "service/log.h"

namespace millrace {
namespace {

constexpr absl::string_view kNames[] = {"no_token", "wrong_token", "not_admin", "wrong_role"};
constexpr size_t kMaxPeerBytes = 128;

}  // namespace

void Refusals::Add(Reason reason, absl::string_view method, absl::string_view peer) {
  counts_[reason].fetch_add(1, std::memory_order_relaxed);
  peer = peer.substr(0, kMaxPeerBytes);
  const absl::string_view service = method.substr(0, method.rfind('/')).substr(0, kMaxPeerBytes);
  const auto kept_back = said_.Say(absl::StrCat(reason, service, " ", peer), absl::Now());
  if (!kept_back.has_value()) return;
  Log(LogLevel::kWarning, "call_refused",
      {{"reason", kNames[reason]}, {"service", service}, {"peer", peer}, {"kept_back", *kept_back}});
}

void Refusals::Fill(MetricPage* page) const {
  for (size_t reason = 0; reason < kNumReasons; ++reason) {
    page->AddCounter("millrace_refused_calls_total", "calls that their peer may not make",
                     static_cast<double>(counts_[reason].load(std::memory_order_relaxed)),
                     {{"reason", std::string(kNames[reason])}});
  }
}

}  // namespace millrace
