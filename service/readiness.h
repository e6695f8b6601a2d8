// Decides whether a service is ready, ten times a second and when told to look, and says so to the HealthService: ready
// is what the sample says, unless the work is stuck or the process drains. Any thread, and one of its own. Lives as
// long as the service. Its lock comes before whatever the sample takes.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "service/health_service.h"
#include "service/progress_watch.h"

namespace millrace {

class Readiness {
 public:
  struct Sample {
    bool ready = false;
    Progress progress;
  };

  // The service is NOT_SERVING until a sample says otherwise.
  Readiness(HealthService* health, std::string service, std::function<Sample()> sample);
  ~Readiness();
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;

  void Look();   // now
  void Drain();  // not ready, at once and for good
  bool ready() const { return ready_.load(std::memory_order_relaxed); }
  bool stuck() const { return stuck_.load(std::memory_order_relaxed); }
  // Without a step, while work is pending; as of the latest look.
  int64_t waited_us() const { return waited_us_.load(std::memory_order_relaxed); }

 private:
  void Run();
  void Decide() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  HealthService* const health_;
  const std::string service_;
  const std::function<Sample()> sample_;
  std::atomic<bool> ready_{false};
  std::atomic<bool> stuck_{false};
  std::atomic<int64_t> waited_us_{0};

  absl::Mutex mutex_;
  ProgressWatch watch_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace millrace
