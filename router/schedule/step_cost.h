// The predicted time of a step, in seconds: the formula of StepCost in worker.proto. Pure functions, O(1).
#pragma once

#include <algorithm>

#include "millrace/worker/v1/worker.pb.h"

namespace millrace {

// Prefill of n tokens after `start` others.
inline double PrefillSeconds(const worker::v1::StepCost& cost, double start, double n) {
  return n * (cost.prefill_token_us() * 1e-6 + (start + n / 2) * cost.prefill_context_ns() * 1e-9);
}

// What decoding rows add to a step.
inline double DecodeSeconds(const worker::v1::StepCost& cost, double rows, double context) {
  return rows * cost.row_us() * 1e-6 + context * cost.context_ns() * 1e-9;
}

inline double StepSeconds(const worker::v1::StepCost& cost, double prefill_seconds, double rows, double context) {
  return std::max(cost.step_us() * 1e-6, prefill_seconds) + DecodeSeconds(cost, rows, context);
}

}  // namespace millrace
