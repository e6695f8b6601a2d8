#include "service/once_a_minute.h"

#include <utility>

namespace millrace {

std::optional<uint64_t> OnceAMinute::Say(const std::string& key, absl::Time now) {
  const absl::Time stale = now - absl::Minutes(1);
  absl::MutexLock lock(&mutex_);
  if (const auto found = said_.find(key); found != said_.end()) {
    if (found->second.when > stale) {
      ++found->second.kept_back;
      return std::nullopt;
    }
    found->second.when = now;
    return std::exchange(found->second.kept_back, 0);
  }
  if (said_.size() >= kMaxKeys) {
    absl::erase_if(said_, [&](const auto& entry) { return entry.second.when <= stale; });
    if (said_.size() >= kMaxKeys) return std::nullopt;
  }
  said_[key] = {now};
  return 0;
}

}  // namespace millrace
