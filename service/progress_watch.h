// Whether work that is pending goes on: stuck is work without a step for max(2 s, 20 usual steps, twice the longest
// step). A pure object: time is an argument, microseconds on a monotonic clock. The owner's thread.
#pragma once

#include <algorithm>
#include <cstdint>

namespace millrace {

struct Progress {
  bool pending = false;         // there is something to compute
  uint64_t steps = 0;           // more are progress; fewer are a worker that has begun anew
  int64_t usual_step_us = 0;    // 0: not known
  int64_t longest_step_us = 0;  // that is in order; 0: not known
};

class ProgressWatch {
 public:
  static constexpr int64_t kLeastDeadlineUs = 2'000'000;
  static constexpr int64_t kUsualSteps = 20;

  // How long pending work has been without a step.
  int64_t Waited(const Progress& progress, int64_t now) {
    if (!progress.pending || !pending_ || progress.steps > steps_) since_ = now;
    pending_ = progress.pending;
    steps_ = progress.steps;
    return now - since_;
  }
  // Beyond this it is stuck.
  static int64_t Deadline(const Progress& progress) {
    return std::max({kLeastDeadlineUs, kUsualSteps * progress.usual_step_us, 2 * progress.longest_step_us});
  }

 private:
  bool pending_ = false;
  uint64_t steps_ = 0;
  int64_t since_ = 0;  // of the latest progress
};

}  // namespace millrace
