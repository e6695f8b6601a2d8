#include <algorithm>
#include <sstream>

#include "cli/bench/measurements.h"
#include "cli/bench/workload.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace millrace {
namespace {

using ::testing::HasSubstr;

constexpr char kTrace[] = R"({"timestamp": 3000, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]})"
                          "\n"
                          R"({"timestamp": 3000, "input_length": 1024, "output_length": 30, "hash_ids": [0, 2]})"
                          "\n"
                          R"({"timestamp": 6000, "input_length": 512, "output_length": 5, "hash_ids": [0]})"
                          "\n";

TEST(Workload, GivesEqualPrefixesToEqualIdsOnly) {
  std::istringstream lines(kTrace);
  const auto plan = PlanTrace(lines, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->size(), 3u);
  const auto a = PromptOf((*plan)[0], 700), b = PromptOf((*plan)[1], 700), c = PromptOf((*plan)[2], 700);
  EXPECT_EQ(a.size(), 700u);
  EXPECT_EQ(b.size(), 1024u);
  EXPECT_TRUE(std::equal(c.begin(), c.end(), a.begin()));
  EXPECT_TRUE(std::equal(c.begin(), c.end(), b.begin()));
  EXPECT_FALSE(std::equal(a.begin() + 512, a.end(), b.begin() + 512));
  EXPECT_EQ(a, PromptOf((*plan)[0], 700));
  EXPECT_LT(*std::max_element(b.begin(), b.end()), 700);
}

TEST(Workload, SpreadsATickAndRunsFaster) {
  WorkloadOptions options;
  options.speed = 2;
  std::istringstream lines(kTrace);
  const auto plan = PlanTrace(lines, options);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ((*plan)[0].start, absl::ZeroDuration());
  EXPECT_EQ((*plan)[1].start, absl::Milliseconds(750));
  EXPECT_EQ((*plan)[2].start, absl::Milliseconds(1500));
}

TEST(Workload, ScalesLengthsAndKeepsPrefixes) {
  WorkloadOptions options;
  options.scale = 0.125;
  options.num_requests = 2;
  std::istringstream lines(kTrace);
  const auto plan = PlanTrace(lines, options);
  ASSERT_TRUE(plan.ok());
  ASSERT_EQ(plan->size(), 2u);
  const auto a = PromptOf((*plan)[0], 700), b = PromptOf((*plan)[1], 700);
  EXPECT_EQ(a.size(), 88u);
  EXPECT_EQ(b.size(), 128u);
  EXPECT_EQ((*plan)[1].output_tokens, 4u);
  EXPECT_TRUE(std::equal(a.begin(), a.begin() + 64, b.begin()));
}

TEST(Workload, NamesTheLineOfABadTrace) {
  for (const char* bad : {"{", "[]", "{}", R"({"timestamp":1,"input_length":513,"output_length":1,"hash_ids":[1]})",
                          R"({"timestamp":-1,"input_length":1,"output_length":1,"hash_ids":[1]})",
                          R"({"timestamp":1,"input_length":0,"output_length":1,"hash_ids":[]})",
                          R"({"timestamp":1,"input_length":1,"output_length":1,"hash_ids":["x"]})",
                          R"({"timestamp":1,"input_length":1e30,"output_length":1,"hash_ids":[1]})"}) {
    std::istringstream lines(R"({"timestamp":1,"input_length":1,"output_length":1,"hash_ids":[1]})" +
                             std::string("\n") + bad);
    const auto plan = PlanTrace(lines, {});
    ASSERT_FALSE(plan.ok()) << bad;
    EXPECT_THAT(std::string(plan.status().message()), HasSubstr("trace, line 2: "));
  }
}

TEST(Workload, SharesAPrefixWithinAGroup) {
  WorkloadOptions options;
  options.workload = "shared_prefix";
  options.num_requests = 4;
  options.groups = 2;
  options.input_tokens = 40;
  options.prefix_tokens = 30;
  const auto plan = PlanSynthetic(options);
  ASSERT_TRUE(plan.ok());
  std::vector<std::vector<int32_t>> prompts;
  for (const PlannedRequest& request : *plan) prompts.push_back(PromptOf(request, 50000));
  EXPECT_TRUE(std::equal(prompts[0].begin(), prompts[0].begin() + 30, prompts[2].begin()));
  EXPECT_NE(prompts[0], prompts[2]);
  EXPECT_NE(prompts[0][0], prompts[1][0]);
  options.prefix_tokens = 40;
  EXPECT_FALSE(PlanSynthetic(options).ok());
}

TEST(Workload, ArrivesAtItsRate) {
  WorkloadOptions options;
  options.num_requests = 10000;
  options.rate = 50;
  const auto plan = PlanSynthetic(options);
  ASSERT_TRUE(plan.ok());
  EXPECT_NEAR(absl::ToDoubleSeconds(plan->back().start), 200, 10);  // 5 standard deviations
  EXPECT_TRUE(
      std::is_sorted(plan->begin(), plan->end(), [](const auto& a, const auto& b) { return a.start < b.start; }));
}

TEST(Measurements, SummariseByNearestRankAndCountFailuresAgainstTheSlo) {
  Measurements measurements;
  for (int i = 1; i <= 100; ++i) {
    RequestRecord record;
    record.ttft_ms = static_cast<float>(i);
    record.end_to_end_ms = static_cast<float>(i + 90);
    record.output_tokens = 10;
    record.prompt_tokens = 20;
    record.cached_tokens = 5;
    record.gaps_ms = std::vector<float>(9, 10);
    measurements.Add(record);
  }
  RequestRecord failed;
  failed.status = absl::UnavailableError("no worker");
  for (int i = 0; i < 100; ++i) measurements.Add(failed);
  const auto summary = measurements.Summary(2, {.ttft_ms = 50, .itl_ms = 10});
  EXPECT_EQ(summary["ttft_ms"]["p50"], 50);
  EXPECT_EQ(summary["ttft_ms"]["p99"], 99);
  EXPECT_EQ(summary["itl_ms"]["mean"], 10);
  EXPECT_EQ(summary["goodput_per_s"], 25);
  EXPECT_EQ(summary["within_slo"], 0.25);
  EXPECT_EQ(summary["hit_rate"], 0.25);
  EXPECT_EQ(summary["output_tokens_per_s"], 500);
  EXPECT_EQ(summary["errors"]["UNAVAILABLE"]["count"], 100);
  EXPECT_THAT(SummaryTable(summary), HasSubstr("UNAVAILABLE 100 times, first: no worker"));
}

}  // namespace
}  // namespace millrace
