// Where a sequence goes and when: the order of prefills and the cost of a placement, both in predicted seconds. Pure
// functions, O(1). What each term is for stands in the README.
#pragma once

#include <cstdint>

#include "router/schedule/sequence.h"
#include "router/schedule/step_cost.h"

namespace millrace {

// The order in the queue and among a worker's prefills, lowest first: priority, then those that ran before, then
// left / (1 + waited / limit), with `left` the predicted seconds of prefill that remain; what is late yields.
int64_t PrefillRank(const Sequence& sequence, double left, Time now);

// Its first token comes later than its limit even if its prefill starts now.
bool IsLate(const Sequence& sequence, double left, Time now);

// It was admitted, and its answer comes too late if its prefill does not go on now: it goes before what is admitted
// later, so that nothing is computed in vain.
bool IsUrgent(const Sequence& sequence, double left, Time now);

// A worker as a candidate.
struct WorkerLoad {
  const worker::v1::StepCost* cost;
  double step_target;  // seconds
  double rows;         // decoding slots
  double context;      // their tokens
  double prefills;     // slots that prefill
  double wait;         // seconds of prefill that go before this one
  double output;       // tokens that an answer is expected to have
};

// By how much prefill takes longer there than its own seconds: the rest of each step is the decoding rows'.
double Slowdown(const WorkerLoad& worker);

// Of so many tokens after the first.
double DecodeSeconds(const WorkerLoad& worker, double tokens);

// Until its first token, and with so many more, whose own prefill takes `own` seconds.
double AnswerSeconds(const WorkerLoad& worker, double own, double tokens);

// Cost of running a prompt of `tokens` tokens there, whose own prefill takes `own` seconds.
double PlacementCost(const WorkerLoad& worker, double own, double tokens);

}  // namespace millrace
