// Files that may be replaced while the process runs: certificates, tokens. Read again every second, on a thread of its
// own; the destructor waits for it. A replaced Secret of Kubernetes is seen, as contents are compared.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace millrace {

class WatchedFiles {
 public:
  static constexpr absl::Duration kPeriod = absl::Seconds(1);
  using Contents = absl::StatusOr<std::vector<std::string>>;  // one of each file, or what kept one from being read

  // `changed` is called on the thread, when they are not as they were before; `known` is what the caller has read.
  WatchedFiles(std::vector<std::string> paths, Contents known, std::function<void(const Contents&)> changed);
  ~WatchedFiles();
  WatchedFiles(const WatchedFiles&) = delete;
  WatchedFiles& operator=(const WatchedFiles&) = delete;

  // At most 1 MiB of each. NOT_FOUND, or what the system says, naming the file.
  static Contents Read(const std::vector<std::string>& paths);

 private:
  void Run(Contents known);

  const std::vector<std::string> paths_;
  const std::function<void(const Contents&)> changed_;

  absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace millrace
