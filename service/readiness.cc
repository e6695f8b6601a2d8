#include "service/readiness.h"

#include <chrono>
#include <utility>

#include "absl/time/time.h"
#include "service/log.h"

namespace millrace {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(100);

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Readiness::Readiness(HealthService* health, std::string service, std::function<Sample()> sample)
    : health_(health), service_(std::move(service)), sample_(std::move(sample)) {
  health_->SetServing(service_, false);
  thread_ = std::thread([this] { Run(); });
}

Readiness::~Readiness() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void Readiness::Look() {
  absl::MutexLock lock(&mutex_);
  Decide();
}

void Readiness::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  Decide();
}

void Readiness::Run() {
  absl::MutexLock lock(&mutex_);
  while (!stop_) {
    Decide();
    mutex_.AwaitWithTimeout(absl::Condition(&stop_), kInterval);
  }
}

void Readiness::Decide() {
  const Sample sample = sample_();
  const int64_t waited = watch_.Waited(sample.progress, NowUs());
  waited_us_.store(waited, std::memory_order_relaxed);
  const bool stuck = waited > ProgressWatch::Deadline(sample.progress);
  if (stuck != stuck_.exchange(stuck, std::memory_order_relaxed)) {
    Log(stuck ? LogLevel::kError : LogLevel::kWarning, stuck ? "stuck" : "goes_on",
        {{"service", service_}, {"steps", sample.progress.steps}, {"usual_step_us", sample.progress.usual_step_us}});
  }
  const bool ready = sample.ready && !stuck && !draining_;
  ready_.store(ready, std::memory_order_relaxed);
  health_->SetServing(service_, ready);
}

}  // namespace millrace
