#include "router/schedule/step_cost_fit.h"

#include <cmath>
#include <random>

#include "gtest/gtest.h"
#include "router/schedule/step_cost.h"
#include "tests/router/schedule/random_seed.h"

namespace millrace {
namespace {

worker::v1::StepCost Cost(double step, double token, double before, double row, double context) {
  worker::v1::StepCost cost;
  cost.set_step_us(step);
  cost.set_prefill_token_us(token);
  cost.set_prefill_context_ns(before);
  cost.set_row_us(row);
  cost.set_context_ns(context);
  return cost;
}

// A step of random make, as long as `real` says.
worker::v1::StepReport Step(const worker::v1::StepCost& real, std::mt19937_64& rng) {
  worker::v1::StepReport report;
  const auto rows = static_cast<uint32_t>(rng() % 64);
  const uint64_t context = uint64_t{rows} * (100 + rng() % 8000);
  const uint32_t tokens = rows == 0 || rng() % 2 == 0 ? 256 + static_cast<uint32_t>(rng() % 4096) : 0;
  const uint64_t start = rng() % 16384;
  report.set_decode_rows(rows);
  report.set_decode_context(context);
  report.set_prefill_tokens(tokens);
  report.set_prefill_context(tokens * start + uint64_t{tokens} * tokens / 2);
  const double prefill = PrefillSeconds(real, static_cast<double>(start), tokens);
  report.set_step_us(
      static_cast<uint32_t>(std::llround(1e6 * StepSeconds(real, prefill, rows, static_cast<double>(context)))));
  return report;
}

void ExpectNear(const worker::v1::StepCost& fitted, const worker::v1::StepCost& real, double share) {
  EXPECT_NEAR(fitted.step_us(), real.step_us(), share * real.step_us());
  EXPECT_NEAR(fitted.prefill_token_us(), real.prefill_token_us(), share * real.prefill_token_us());
  EXPECT_NEAR(fitted.prefill_context_ns(), real.prefill_context_ns(), share * real.prefill_context_ns());
  EXPECT_NEAR(fitted.row_us(), real.row_us(), share * real.row_us());
  EXPECT_NEAR(fitted.context_ns(), real.context_ns(), share * real.context_ns());
}

TEST(StepCostFit, HealsACostThatIsThreeTimesOff) {
  std::mt19937_64 rng(TestSeed(1));
  const worker::v1::StepCost start = Cost(4500, 22, 0.8, 20, 34);
  for (const double factor : {3.0, 1 / 3.0}) {
    const worker::v1::StepCost real = Cost(4500 * factor, 22 * factor, 0.8 * factor, 20 * factor, 34 * factor);
    StepCostFit fit(start);
    for (int i = 0; i < 1000; ++i) fit.Add(Step(real, rng));
    EXPECT_TRUE(fit.confident());
    ExpectNear(fit.cost(), real, 0.05);
  }
}

TEST(StepCostFit, TimeSpentOnDraftingIsNotTheStepsOwn) {
  std::mt19937_64 rng(TestSeed(5));
  const worker::v1::StepCost real = Cost(4500, 22, 0.8, 20, 34);
  StepCostFit fit(real);
  for (int i = 0; i < 1000; ++i) {
    worker::v1::StepReport report = Step(real, rng);
    report.set_draft_us(static_cast<uint32_t>(rng() % 5000));
    report.set_step_us(report.step_us() + report.draft_us());
    fit.Add(report);
  }
  ExpectNear(fit.cost(), real, 0.05);
}

TEST(StepCostFit, TellsTermsApart) {
  std::mt19937_64 rng(TestSeed(2));
  const worker::v1::StepCost real = Cost(9000, 22, 1.6, 60, 17);
  StepCostFit fit(Cost(4500, 22, 0.8, 20, 34));
  for (int i = 0; i < 5000; ++i) fit.Add(Step(real, rng));
  ExpectNear(fit.cost(), real, 0.25);
}

// One step in ten takes ten times as long, one in a hundred claims to have taken none.
TEST(StepCostFit, IsNotMovedByOutliers) {
  std::mt19937_64 rng(TestSeed(3));
  const worker::v1::StepCost real = Cost(4500, 22, 0.8, 20, 34);
  StepCostFit fit(real);
  for (int i = 0; i < 5000; ++i) {
    worker::v1::StepReport report = Step(real, rng);
    if (rng() % 10 == 0) report.set_step_us(report.step_us() * 10);
    if (rng() % 100 == 0) report.set_step_us(1);
    fit.Add(report);
  }
  ExpectNear(fit.cost(), real, 0.5);
}

TEST(StepCostFit, StaysWithinItsBoundsWhateverIsReported) {
  std::mt19937_64 rng(TestSeed(4));
  const worker::v1::StepCost start = Cost(0, 1e-300, 1e9, 0, 1e9);
  StepCostFit fit(start);
  for (int i = 0; i < 20'000; ++i) {
    worker::v1::StepReport report;
    report.set_step_us(static_cast<uint32_t>(rng() >> (rng() % 64)));
    report.set_decode_rows(static_cast<uint32_t>(rng() >> (rng() % 64)));
    report.set_decode_context(rng() >> (rng() % 64));
    report.set_prefill_tokens(static_cast<uint32_t>(rng() >> (rng() % 64)));
    report.set_prefill_context(rng() >> (rng() % 64));
    fit.Add(report);
    const worker::v1::StepCost& cost = fit.cost();
    for (const double term :
         {cost.step_us(), cost.prefill_token_us(), cost.prefill_context_ns(), cost.row_us(), cost.context_ns()}) {
      ASSERT_TRUE(std::isfinite(term) && term > 0 && term <= 64e9) << term;
    }
  }
}

TEST(StepCostFit, AHeartbeatSaysNothing) {
  StepCostFit fit(Cost(4500, 22, 0.8, 20, 34));
  for (int i = 0; i < 100; ++i) fit.Add(worker::v1::StepReport());
  EXPECT_FALSE(fit.confident());
  EXPECT_EQ(fit.cost().step_us(), 4500);
}

}  // namespace
}  // namespace millrace
