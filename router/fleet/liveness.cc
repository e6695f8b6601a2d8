#include "router/fleet/liveness.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace millrace {

void Liveness::Heard(Time now, uint64_t steps, uint32_t step_us) {
  heard_at_ = now;
  if (steps > steps_) progress_at_ = now;
  steps_ = std::max(steps_, steps);
  if (step_us != 0) usual_step_us_ += usual_step_us_ == 0 ? step_us : (int64_t{step_us} - usual_step_us_) / 8;
}

Time Liveness::ProgressLimit(double prefill_left) const {
  const Time patience = std::max(kLeastProgressLimit, kStepsOfPatience * usual_step_us_);
  const double predicted = std::clamp(prefill_left, 0.0, 1e3) * kPrefillsOfPatience * 1e6;
  return std::min(patience + static_cast<Time>(predicted), kMostProgressLimit);
}

absl::Status Liveness::Look(Time now, std::optional<double> prefill_left) {
  const Time late = now - looked_at_ - kLookEvery;
  looked_at_ = now;
  if (late > kSilenceLimit / 2) {
    heard_at_ = progress_at_ = now;
    return absl::OkStatus();
  }
  if (now - heard_at_ >= kSilenceLimit) {
    return absl::UnavailableError(
        absl::StrCat("nothing was heard for ", (now - heard_at_) / 1000, " ms; the limit is ", kSilenceLimit / 1000));
  }
  if (!prefill_left.has_value() || !working_) progress_at_ = now;
  working_ = prefill_left.has_value();
  if (!working_) return absl::OkStatus();
  const Time limit = ProgressLimit(*prefill_left);
  if (now - progress_at_ < limit) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat("it has work, and step ", steps_ + 1, " has not ended for ",
                                                  (now - progress_at_) / 1000, " ms; the limit is ", limit / 1000));
}

}  // namespace millrace
