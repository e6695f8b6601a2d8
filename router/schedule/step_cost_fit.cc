#include "router/schedule/step_cost_fit.h"

#include <algorithm>
#include <cmath>

#include "router/schedule/step_cost.h"

namespace millrace {
namespace {

constexpr double kKept = 1 - 1.0 / 512;  // of earlier steps, at each step
constexpr double kPull = 0.002;          // towards the common factor
constexpr double kMostFactor = 64;
constexpr double kMostSpeedUp = 2;   // that one step may claim
constexpr double kPrefillRules = 2;  // times the floor

}  // namespace

StepCostFit::StepCostFit(const worker::v1::StepCost& start) : start_(start) {
  start_.set_step_us(std::max(start.step_us(), 10.0));
  start_.set_prefill_token_us(std::max(start.prefill_token_us(), 0.01));
  start_.set_prefill_context_ns(std::max(start.prefill_context_ns(), 1e-4));
  start_.set_row_us(std::max(start.row_us(), 0.01));
  start_.set_context_ns(std::max(start.context_ns(), 0.01));
  cost_ = start;
  // As if a small part of a step had been just as predicted.
  decode_.Add({1.0 / 3, 1.0 / 3, 1.0 / 3}, 0.01);
  prefill_.Add({0.5, 0.5, 0}, 0.01);
}

void StepCostFit::Group::Add(const Terms& shares, double weight) {
  for (int i = 0; i < kTerms; ++i) {
    sums[i] = sums[i] * kKept + weight * shares[i];
    for (int j = 0; j < kTerms; ++j) products[i][j] = products[i][j] * kKept + weight * shares[i] * shares[j];
  }
}

// (products + pull) factors = sums + pull * common, by elimination: the pull keeps it far from singular.
void StepCostFit::Group::Solve(int num_terms) {
  double all = 0, sum = 0, trace = 0;
  for (int i = 0; i < num_terms; ++i) {
    sum += sums[i];
    trace += products[i][i];
    for (int j = 0; j < num_terms; ++j) all += products[i][j];
  }
  if (all <= 0) return;
  const double common = sum / all, pull = kPull * trace / num_terms;
  std::array<Terms, kTerms> left = products;
  Terms right = sums;
  for (int i = 0; i < num_terms; ++i) {
    left[i][i] += pull;
    right[i] += pull * common;
  }
  for (int i = 0; i < num_terms; ++i) {
    for (int j = i + 1; j < num_terms; ++j) {
      const double ratio = left[j][i] / left[i][i];
      for (int k = i; k < num_terms; ++k) left[j][k] -= ratio * left[i][k];
      right[j] -= ratio * right[i];
    }
  }
  for (int i = num_terms; i-- > 0;) {
    for (int k = i + 1; k < num_terms; ++k) right[i] -= left[i][k] * factors[k];
    factors[i] = std::clamp(right[i] / left[i][i], 1 / kMostFactor, kMostFactor);
  }
}

void StepCostFit::Add(const worker::v1::StepReport& report) {
  if (report.step_us() == 0 || report.decode_rows() + uint64_t{report.prefill_tokens()} == 0) return;
  const double rows = report.decode_rows(), context = static_cast<double>(report.decode_context());
  const double tokens = report.prefill_tokens(), before = static_cast<double>(report.prefill_context());
  const double decode_us = DecodeSeconds(cost_, rows, context) * 1e6;
  const double prefill_us = tokens * cost_.prefill_token_us() + before * cost_.prefill_context_ns() * 1e-3;
  const double predicted = std::max(cost_.step_us(), prefill_us) + decode_us;
  const uint32_t without_drafting = report.step_us() - std::min(report.draft_us(), report.step_us());
  double us = std::max<double>(without_drafting, predicted / kMostSpeedUp);
  if (tokens == 0) {
    decode_.Add({start_.step_us() / us, rows * start_.row_us() / us, context * start_.context_ns() * 1e-3 / us});
    decode_.Solve(3);
  } else if (prefill_us >= kPrefillRules * cost_.step_us()) {
    us = std::max(us - decode_us, prefill_us / kMostSpeedUp);
    prefill_.Add({tokens * start_.prefill_token_us() / us, before * start_.prefill_context_ns() * 1e-3 / us, 0});
    prefill_.Solve(2);
  } else {
    return;
  }
  ++num_steps_;
  cost_.set_step_us(start_.step_us() * decode_.factors[0]);
  cost_.set_row_us(start_.row_us() * decode_.factors[1]);
  cost_.set_context_ns(start_.context_ns() * decode_.factors[2]);
  cost_.set_prefill_token_us(start_.prefill_token_us() * prefill_.factors[0]);
  cost_.set_prefill_context_ns(start_.prefill_context_ns() * prefill_.factors[1]);
}

}  // namespace millrace
