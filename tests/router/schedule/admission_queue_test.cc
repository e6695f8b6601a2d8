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
//   1   4 s   8 s    8 s     0         no           2
//   2   1 s   2 s    0 s     0         no           1
//   3   3 s   6 s    0 s     0         no           3
//   4   9 s   18 s   0 s     1         no           9, but a higher priority
//   5   9 s   18 s   0 s     0         yes          0
//   6   0.1 s 2 s    0 s     -1        no           0.1, but a lower priority
TEST(AdmissionQueue, PutsPriorityThenThoseThatRanThenStretch) {
  const Time now = 10 * kSecond;
  Sequence all[] = {Waiting(1, 4, 8, 2 * kSecond), Waiting(2, 1, 2, now),  Waiting(3, 3, 6, now),
                    Waiting(4, 9, 18, now, 1),     Waiting(5, 9, 18, now), Waiting(6, 0.1, 2, now, -1)};
  all[4].returned = true;
  AdmissionQueue queue;
  for (Sequence& sequence : all) queue.Push(&sequence, now);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{4, 5, 2, 1, 3, 6}));
  EXPECT_EQ(queue.tokens(), 18);
  queue.Remove(&all[4]);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{4, 2, 1, 3, 6}));
}

TEST(AdmissionQueue, WaitingMovesAPromptForward) {
  Sequence early = Waiting(1, 4, 8, 0), late = Waiting(2, 3, 8, 20 * kSecond);
  AdmissionQueue queue;
  queue.Push(&early, 0);
  queue.Push(&late, 20 * kSecond);
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{2, 1}));
  queue.Refresh(20 * kSecond);  // 4 / (1 + 20 / 8) = 1.14 < 3
  EXPECT_EQ(Order(queue), (std::vector<SequenceId>{1, 2}));
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
  const auto load = [&](double wait) { return WorkerLoad{&cost, 0.045, 0, 0, 0, wait}; };
  EXPECT_DOUBLE_EQ(PlacementCost(load(0), 1, 1000), 2);
  EXPECT_NEAR(PlacementCost(load(2), 0.1, 1000), 2.2, 1e-12);
  EXPECT_NEAR(PlacementCost(load(1), 0.1, 1000), 1.2, 1e-12);
}

TEST(Placement, DecodingRowsMakeAWorkerDearer) {
  worker::v1::StepCost cost;
  cost.set_prefill_token_us(1000);
  cost.set_row_us(100);
  const WorkerLoad idle{&cost, 0.045, 0, 0, 0, 0}, rows{&cost, 0.045, 225, 0, 0, 0},
      overloaded{&cost, 0.045, 4500, 0, 0, 0};
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
