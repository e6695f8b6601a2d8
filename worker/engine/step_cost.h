// What a step is predicted to take: the formula of worker.proto's StepCost, its inverse, and its measurement at
// start-up. Microseconds. The first three are pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "millrace/worker/v1/worker.pb.h"
#include "worker/engine/engine_limits.h"
#include "worker/model/model.h"

namespace millrace {

// Prefill of n tokens after `start` of the same sequence; the step's floor, step_us, is not in it.
double PrefillUs(const worker::v1::StepCost& cost, int64_t start, int64_t n);
// Decoding rows with `context` tokens in their caches, all together; likewise.
double DecodeUs(const worker::v1::StepCost& cost, int64_t rows, int64_t context);
// The largest n <= max_n with PrefillUs(cost, start, n) <= budget_us.
int64_t PrefillFitting(const worker::v1::StepCost& cost, int64_t start, int64_t max_n, double budget_us);

// Times a few steps of random tokens and fits the formula to them: about a second on a CPU with a model of 135 M
// parameters. Writes into blocks of the pool, which nobody reads before writing them; start-up only. REQUIRES
// vocab_size >= 1.
worker::v1::StepCost MeasureStepCost(Model& model, const EngineLimits& limits);
// Every way to draft that the model has, with what it costs; likewise.
std::vector<worker::v1::Drafter> MeasureDrafters(Model& model, const EngineLimits& limits);

}  // namespace millrace
