// Sends a plan to a router and measures. Made for one run, on the caller's thread; answers come on gRPC's threads.
#pragma once

#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cli/bench/measurements.h"
#include "cli/bench/workload.h"
#include "millrace/v1/inference.grpc.pb.h"

namespace millrace {

struct LoadOptions {
  size_t concurrency = 0;  // requests at a time; 0: open loop, each at its planned start whatever became of the others
  uint32_t vocab_size = 0;
  double temperature = 0;
  absl::Duration timeout;  // of a request
};

class Load {
 public:
  // `progress`, if any, is called a few times a second with the number of finished requests.
  Load(v1::InferenceService::Stub& stub, LoadOptions options, std::function<void(size_t)> progress)
      : stub_(stub), options_(options), progress_(std::move(progress)) {}

  // Blocks until all requests have ended. Seconds from the first start to the last end go into `seconds`.
  Measurements Run(const std::vector<PlannedRequest>& plan, double& seconds) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Send(const PlannedRequest& planned, absl::Time due);
  void Finished(RequestRecord record) ABSL_LOCKS_EXCLUDED(mutex_);
  // Until fewer than `open` requests are open, or `until` has come.
  void WaitForRoom(size_t open, absl::Time until) ABSL_LOCKS_EXCLUDED(mutex_);

  v1::InferenceService::Stub& stub_;
  const LoadOptions options_;
  const std::function<void(size_t)> progress_;

  absl::Mutex mutex_;
  size_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  Measurements measurements_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace millrace
