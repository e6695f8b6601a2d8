#include "router/schedule/admission_queue.h"

#include <random>
#include <set>

#include "gtest/gtest.h"
#include "router/schedule/placement.h"
#include "tests/router/schedule/random_seed.h"

namespace millrace {
namespace {

constexpr Time kSecond = 1'000'000;

Sequence Waiting(SequenceId id, double left, double limit, Time submitted, int priority = 0) {
  Sequence sequence;
  sequence.id = id;
  sequence.tokens = {1, 2, 3};
  sequence.left = left;
  sequence.limit = limit;
  sequence.priority = priority;
  sequence.report.submitted = submitted;
  return sequence;
}

std::vector<SequenceId> Order(const AdmissionQueue& queue) {
  std::vector<Sequence*> first;
  queue.First(queue.size(), &first);
  std::vector<SequenceId> ids;
  for (const Sequence* sequence : first) ids.push_back(sequence->id);
  return ids;
}

// At 10 s, key = left / (1 + waited / limit):
//   id  left  limit  waited  priority  ran before   key
//   1   4 s   16 s   8 s     0         no           2.7
//   2   1 s   2 s    0 s     0         no           1
//   3   3 s   6 s    0 s     0         no           3
//   4   9 s   18 s   0 s     1         no           9, but a higher priority
//   5   9 s   18 s   0 s     0         yes          0
//   6   0.1 s 2 s    0 s     -1        no           0.1, but a lower priority
TEST(AdmissionQueue, PutsPriorityThenThoseThatRanThenStretch) {
  const Time now = 10 * kSecond;
  Sequence all[] = {Waiting(1, 4, 16, 2 * kSecond), Waiting(2, 1, 2, now),  Waiting(3, 3, 6, now),
                    Waiting(4, 9, 18, now, 1),      Waiting(5, 9, 18, now), Waiting(6, 0.1, 2, now, -1)};
  all[4].returned = true;
  AdmissionQueue queue;
  for (Sequence& sequence : all) queue.Push(&sequence, now);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{4, 5, 2, 1, 3, 6}));
  EXPECT_EQ(queue.tokens(), 18);
  queue.Remove(&all[4]);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{4, 2, 1, 3, 6}));
}

TEST(AdmissionQueue, WaitingMovesAPromptForward) {
  Sequence early = Waiting(1, 4, 40, 0), late = Waiting(2, 3, 40, 20 * kSecond);
  AdmissionQueue queue;
  queue.Push(&early, 0);
  queue.Push(&late, 20 * kSecond);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{2, 1}));
  queue.Refresh(20 * kSecond);  // 4 / (1 + 20 / 40) = 2.7 < 3
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{1, 2}));
}

// After 3 s the first can no longer have its first token within 2 s: 16 * 1 / (1 + 3 / 2) = 6.4 > 3.
TEST(AdmissionQueue, WhatIsTooLateYieldsToWhatCanBeInTime) {
  Sequence hopeless = Waiting(1, 1, 2, 0), hopeful = Waiting(2, 3, 6, 3 * kSecond);
  AdmissionQueue queue;
  queue.Push(&hopeless, 3 * kSecond);
  queue.Push(&hopeful, 3 * kSecond);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{2, 1}));
}

// Prompts of 3 tokens. a has been served 10 tokens, b none: b's turns come until it is level, then both in turn.
TEST(AdmissionQueue, ServesTheTenantFirstThatWasServedLeast) {
  AdmissionQueue queue;
  Tenant* const a = queue.Enter("a");
  Tenant* const b = queue.Enter("b");
  std::vector<Sequence> all;
  for (SequenceId id = 1; id <= 8; ++id) {
    all.push_back(Waiting(id, static_cast<double>(id), 100, 0));
    all.back().tenant = id <= 4 ? a : b;
  }
  for (Sequence& sequence : all) queue.Push(&sequence, 0);
  queue.Charge(all[0], 10, true);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{5, 6, 7, 8, 1, 2, 3, 4}));
  queue.Charge(all[4], 5, true);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{5, 6, 1, 7, 2, 8, 3, 4}));
  all[7].priority = 1;
  queue.Update(&all[7], 0);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{8, 5, 1, 6, 2, 7, 3, 4}));
}

TEST(AdmissionQueue, APauseSavesNothingUp) {
  AdmissionQueue queue;
  Sequence early = Waiting(1, 1, 100, 0), other = Waiting(2, 2, 100, 0), late = Waiting(3, 3, 100, 0);
  early.tenant = other.tenant = queue.Enter("busy");
  late.tenant = queue.Enter("late");
  queue.Push(&early, 0);
  for (int i = 0; i < 10; ++i) queue.Charge(early, 100, true);
  queue.Push(&late, 0);  // level with what `busy` had when its turn came last
  EXPECT_DOUBLE_EQ(late.tenant->served, 900);
  queue.Push(&other, 0);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{3, 1, 2}));
}

TEST(AdmissionQueue, RemembersABoundedNumberOfTenants) {
  AdmissionQueue queue;
  for (int i = 0; i < 5000; ++i) {
    Sequence sequence = Waiting(1, 1, 100, 0);
    sequence.tenant = queue.Enter(std::to_string(i));
    queue.Push(&sequence, 0);
    queue.Remove(&sequence);
    queue.Charge(sequence, i, false);
    queue.Leave(sequence.tenant);
    ASSERT_LE(queue.num_tenants(), AdmissionQueue::kMaxIdleTenants + 1);
  }
}

// Of the tenant that holds most: 2 is the longest, but 3 has waited beyond its limit, and 4 ran before.
TEST(AdmissionQueue, GivesUpWhatIsTooLateAndThenTheHeaviest) {
  AdmissionQueue queue;
  Sequence all[] = {Waiting(1, 1, 100, 0), Waiting(2, 1, 100, 0), Waiting(3, 1, 2, 0), Waiting(4, 1, 100, 0),
                    Waiting(5, 1, 100, 0)};
  all[1].tokens.resize(100);
  all[3].tokens.resize(200);
  all[3].returned = true;
  all[4].tokens.resize(150);
  all[4].tenant = queue.Enter("other");
  for (Sequence& sequence : all) queue.Push(&sequence, 0);
  EXPECT_EQ(queue.Heaviest(5 * kSecond)->id, 3u);
  EXPECT_EQ(queue.Heaviest(0)->id, 2u);
  for (int i : {0, 1, 2}) queue.Remove(&all[i]);
  EXPECT_EQ(queue.Heaviest(0), nullptr);
  queue.Remove(&all[3]);
  EXPECT_EQ(queue.Heaviest(0)->id, 5u);
}

TEST(AdmissionQueue, KeepsItsCountsAndOrderThroughRandomOperations) {
  std::mt19937_64 rng(TestSeed(3));
  AdmissionQueue queue;
  std::vector<Sequence> all;
  for (SequenceId id = 0; id < 300; ++id) {
    all.push_back(Waiting(id, static_cast<double>(rng() % 1000) / 100, 2, static_cast<Time>(rng() % 1000)));
  }
  std::set<SequenceId> inside;
  Time now = 1000;
  for (int i = 0; i < 100'000; ++i) {
    now += static_cast<Time>(rng() % 1000);
    Sequence& sequence = all[rng() % all.size()];
    if (inside.insert(sequence.id).second) {
      queue.Push(&sequence, now);
    } else if (rng() % 2 == 0) {
      queue.Remove(&sequence);
      inside.erase(sequence.id);
    } else {
      sequence.left = static_cast<double>(rng() % 1000) / 100;
      queue.Update(&sequence, now);
    }
    queue.Refresh(now);
    ASSERT_EQ(queue.size(), inside.size());
  }
  const std::vector<SequenceId> order = Order(queue);
  EXPECT_EQ(std::set<SequenceId>(order.begin(), order.end()), inside);
  for (size_t i = 1; i < order.size(); ++i) EXPECT_LE(all[order[i - 1]].queue_rank, all[order[i]].queue_rank);
}

// 1 ms a token, no other term:  wait  rows  own   cost
//   idle, nothing cached         0    0     1 s   2
//   busy, all but 0.1 s cached   2    0     0.1   2.2
//   busy, all but 0.1 s cached   1    0     0.1   1.2
TEST(Placement, WeighsAHitAgainstAWait) {
  worker::v1::StepCost cost;
  cost.set_prefill_token_us(1000);
  const auto load = [&](double wait) { return WorkerLoad{&cost, 0.045, 0, 0, 0, wait, 350}; };
  EXPECT_DOUBLE_EQ(PlacementCost(load(0), 1, 1000), 2);
  EXPECT_NEAR(PlacementCost(load(2), 0.1, 1000), 2.2, 1e-12);
  EXPECT_NEAR(PlacementCost(load(1), 0.1, 1000), 1.2, 1e-12);
}

TEST(Placement, DecodingRowsMakeAWorkerDearer) {
  worker::v1::StepCost cost;
  cost.set_prefill_token_us(1000);
  cost.set_row_us(100);
  const WorkerLoad idle{&cost, 0.045, 0, 0, 0, 0, 350}, rows{&cost, 0.045, 225, 0, 0, 0, 350},
      overloaded{&cost, 0.045, 4500, 0, 0, 0, 350};
  EXPECT_GE(PlacementCost(rows, 1, 1000), PlacementCost(idle, 1, 1000) + 1);  // half of each step is theirs
  EXPECT_GT(PlacementCost(overloaded, 1, 1000), PlacementCost(rows, 1, 1000));
}

// 10 tokens after 100 at 2 us each and 10 ns per token before: 10 * (2 + 105 * 0.01) us
TEST(StepCost, IsTheFormulaOfTheWire) {
  worker::v1::StepCost cost;
  cost.set_step_us(50);
  cost.set_prefill_token_us(2);
  cost.set_prefill_context_ns(10);
  cost.set_row_us(3);
  cost.set_context_ns(100);
  EXPECT_NEAR(PrefillSeconds(cost, 100, 10), 30.5e-6, 1e-15);
  EXPECT_NEAR(DecodeSeconds(cost, 4, 1000), 112e-6, 1e-15);
  EXPECT_NEAR(StepSeconds(cost, 30.5e-6, 4, 1000), 162e-6, 1e-15);
  EXPECT_NEAR(StepSeconds(cost, 70e-6, 0, 0), 70e-6, 1e-15);
}

}  // namespace
}  // namespace millrace
