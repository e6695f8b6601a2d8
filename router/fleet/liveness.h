// Whether a worker lives, judged by what is heard of it: it is dead when nothing has come for kSilenceLimit, or when it
// has work and no step has ended for longer than its steps can explain. A pure object: every time is an argument. One
// for each ready worker, under the fleet's lock.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "router/schedule/scheduler.h"

namespace millrace {

class Liveness {
 public:
  // A worker sends something every 250 ms. Six of those: a connection that is slow or a host that is busy for a second
  // is not a dead worker, and a client's pause stays below 2.5 s.
  static constexpr Time kSilenceLimit = 1'500'000;
  // A step may be rare and long (a whole chunk of prefill after hundreds of decoding steps), hence 20 times the usual
  // one; three times what the prefill that lies there is predicted to take, since the first step has no usual one.
  static constexpr Time kLeastProgressLimit = 2'000'000;
  static constexpr int64_t kStepsOfPatience = 20;
  static constexpr double kPrefillsOfPatience = 3;
  static constexpr Time kMostProgressLimit = 60'000'000;  // a worker's figures cannot ask for more
  static constexpr Time kLookEvery = 100'000;

  explicit Liveness(Time now) : looked_at_(now), heard_at_(now), progress_at_(now) {}

  // A message came; `steps` as in StepReport, `step_us` 0 if it reports none.
  void Heard(Time now, uint64_t steps, uint32_t step_us);

  // The verdict, to be asked for every kLookEvery. `prefill_left`: predicted seconds of prefill there; nothing if there
  // is nothing that the worker could compute. UNAVAILABLE: silent. DEADLINE_EXCEEDED: no progress.
  // Asked more than half a silence late, this process has been stopped itself: what it did not hear proves nothing,
  // and it counts anew.
  absl::Status Look(Time now, std::optional<double> prefill_left);

 private:
  Time ProgressLimit(double prefill_left) const;

  Time looked_at_;
  Time heard_at_;
  Time progress_at_;  // the end of the latest step, or when work came
  bool working_ = false;
  uint64_t steps_ = 0;
  int64_t usual_step_us_ = 0;  // exponentially weighted, 1/8 for the latest; 0: no step yet
};

}  // namespace millrace
