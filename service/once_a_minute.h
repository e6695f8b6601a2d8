// Which of many like messages are said: of one key, one in a minute, and how many were kept back since. Any thread.
// Bounded: 1,024 keys; beyond them nothing is said until a minute has passed for one of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace millrace {

class OnceAMinute {
 public:
  static constexpr size_t kMaxKeys = 1024;

  // Says: how many with this key were kept back. Nothing: this one is, too.
  std::optional<uint64_t> Say(const std::string& key, absl::Time now);

 private:
  struct Said {
    absl::Time when;
    uint64_t kept_back = 0;
  };

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Said> said_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace millrace
