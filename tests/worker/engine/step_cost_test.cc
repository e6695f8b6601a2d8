#include "worker/engine/step_cost.h"

#include "gtest/gtest.h"
#include "tests/worker/engine/edits.h"
#include "tests/worker/engine/fake_model.h"

namespace millrace::testing {
namespace {

TEST(StepCost, FittingIsTheLargestNumberThatFits) {
  worker::v1::StepCost cost;
  cost.set_prefill_token_us(3);
  cost.set_prefill_context_ns(70);
  for (const int64_t start : {0, 100, 100'000}) {
    for (const double budget : {0.5, 10.0, 1234.5, 1e6}) {
      const int64_t n = PrefillFitting(cost, start, 1 << 20, budget);
      EXPECT_LE(PrefillUs(cost, start, n), budget * (1 + 1e-9));
      EXPECT_GT(PrefillUs(cost, start, n + 1), budget);
    }
  }
}

TEST(StepCost, FreePrefillFitsWhole) { EXPECT_EQ(PrefillFitting(worker::v1::StepCost(), 5, 77, 1), 77); }
TEST(StepCost, NothingFitsInNoTime) { EXPECT_EQ(PrefillFitting(worker::v1::StepCost(), 5, 77, 0), 0); }

TEST(StepCost, MeasuresWithinTheSmallestLimits) {
  const EngineLimits limits = {
      .num_slots = 1, .num_blocks = 1, .vocab_size = 1, .max_context = 1, .max_rows = 1, .max_logit_rows = 1};
  FakeModel model(
      {.num_slots = 1, .num_blocks = 1, .vocab_size = 2, .max_context = 1, .max_rows = 1, .max_logit_rows = 1});
  const worker::v1::StepCost cost = MeasureStepCost(model, limits);
  EXPECT_GE(cost.step_us(), 0);
  EXPECT_GE(cost.prefill_token_us(), 0);
}

TEST(StepCost, MeasuresNumbersThatAreNotNegative) {
  FakeModel model(SmallLimits());
  const worker::v1::StepCost cost = MeasureStepCost(model, SmallLimits());
  for (const double value :
       {cost.step_us(), cost.prefill_token_us(), cost.prefill_context_ns(), cost.row_us(), cost.context_ns()}) {
    EXPECT_GE(value, 0);
    EXPECT_LT(value, 1e9);
  }
  for (const int32_t rows : model.rows_of_steps()) EXPECT_LE(rows, SmallLimits().max_rows);
}

}  // namespace
}  // namespace millrace::testing
