// What a worker's steps really cost: the StepCost that it gave when it came, corrected by its reports. Two groups of
// terms are fitted apart, {floor, row, context} from steps without prefill and {token, its context} from those where
// prefill rules: least squares of relative errors, older steps forgotten, drawn towards the group's common factor, so
// that terms which the steps cannot tell apart keep their proportion. Slow outliers weigh nothing in relative terms and
// fast ones are cut; every term stays within a factor of 64 of what it was. Lives as long as the worker; O(1).
#pragma once

#include <array>
#include <cstdint>

#include "millrace/worker/v1/worker.pb.h"

namespace millrace {

class StepCostFit {
 public:
  explicit StepCostFit(const worker::v1::StepCost& start);

  void Add(const worker::v1::StepReport& report);  // heartbeats say nothing
  const worker::v1::StepCost& cost() const { return cost_; }
  bool confident() const { return num_steps_ >= kConfident; }

 private:
  static constexpr uint64_t kConfident = 16;  // steps
  static constexpr int kTerms = 3;
  using Terms = std::array<double, kTerms>;

  // In multiples of the start's terms: what each would have to be multiplied with.
  struct Group {
    std::array<Terms, kTerms> products{};  // of the terms' shares of a step, summed
    Terms sums{};                          // of the shares
    Terms factors{1, 1, 1};
    void Add(const Terms& shares, double weight = 1);
    void Solve(int num_terms);
  };

  worker::v1::StepCost start_;  // no term zero
  worker::v1::StepCost cost_;
  Group decode_;
  Group prefill_;
  uint64_t num_steps_ = 0;
};

}  // namespace millrace
