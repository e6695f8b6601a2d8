#include <limits>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "service/histogram.h"
#include "service/metrics_server.h"
#include "service/progress_watch.h"
#include "tests/http_get.h"

namespace millrace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST(HistogramTest, CountsAValueAtItsBoundAndBelow) {
  Histogram histogram({{.3, 1, 2.5}}, 1e-6);
  for (const int64_t us : {0, 300'000, 300'001, 1'000'000, 2'500'000, 2'500'001, 90'000'000}) histogram.Observe(us);
  const Histogram::Snapshot snapshot = histogram.Take();
  EXPECT_THAT(snapshot.cumulative, ElementsAre(2, 4, 5));
  EXPECT_EQ(snapshot.count, 7u);
  EXPECT_NEAR(snapshot.sum, 96.600002, 1e-9);
}

TEST(HistogramTest, LosesNothingAmongThreads) {
  Histogram histogram({{1, 10}}, 1);
  constexpr int kThreads = 4, kEach = 20'000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) histogram.Observe(i % 3 * 5);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(histogram.Take().count, static_cast<uint64_t>(kThreads * kEach));
  EXPECT_EQ(histogram.Take().cumulative.back(), static_cast<uint64_t>(kThreads * kEach));
}

TEST(ProgressWatchTest, WaitsOnlyWhileWorkIsPendingAndNoStepComes) {
  ProgressWatch watch;
  EXPECT_EQ(watch.Waited({.pending = false}, 1'000), 0);
  EXPECT_EQ(watch.Waited({.pending = true}, 9'000'000), 0);  // it begins to count here, not when it was idle
  EXPECT_EQ(watch.Waited({.pending = true}, 9'500'000), 500'000);
  EXPECT_EQ(watch.Waited({.pending = true, .steps = 1}, 9'600'000), 0);
  EXPECT_EQ(watch.Waited({.pending = true, .steps = 0}, 9'700'000), 100'000);
  EXPECT_EQ(watch.Waited({.pending = false, .steps = 0}, 99'700'000), 0);
}

TEST(ProgressWatchTest, TakesAWorkerThatBeginsAnewForNoProgress) {
  ProgressWatch watch;
  watch.Waited({.pending = true, .steps = 7}, 0);
  EXPECT_EQ(watch.Waited({.pending = true, .steps = 0}, 1'500'000), 1'500'000);
  EXPECT_EQ(watch.Waited({.pending = true, .steps = 1}, 1'600'000), 0);
}

TEST(ProgressWatchTest, GivesSlowWorkersLonger) {
  EXPECT_EQ(ProgressWatch::Deadline({}), 2'000'000);
  EXPECT_EQ(ProgressWatch::Deadline({.usual_step_us = 300'000}), 6'000'000);
  EXPECT_EQ(ProgressWatch::Deadline({.usual_step_us = 1, .longest_step_us = 4'000'000}), 8'000'000);
}

class MetricsServerTest : public testing::Test {
 protected:
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& listen) {
    return MetricsServer::Start(listen, [](MetricPage* page) {
      static const Histogram histogram({{.3, 7680}}, 1e-6);
      page->AddGauge("vllm:g", "a gauge", 0.25, {{"model_name", "a \"b\"\\\n"}});
      page->AddCounter("c_total", "a counter", 3, {{"code", "OK"}});
      page->AddCounter("other_total", "another", 1);
      page->AddCounter("c_total", "a counter", 4, {{"code", "ABORTED"}});
      page->AddHistogram("h_seconds", "a histogram", histogram);
    });
  }
};

TEST_F(MetricsServerTest, SpeaksTheTextFormat) {
  const auto server = Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT((*server)->address(), StartsWith("127.0.0.1:"));
  EXPECT_THAT((*server)->address(), Not("127.0.0.1:0"));
  const std::string answer = HttpGet((*server)->address(), "/metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("# TYPE vllm:g gauge\nvllm:g{model_name=\"a \\\"b\\\"\\\\\\n\"} 0.25\n"));
  // One family, though something came between its series.
  EXPECT_THAT(answer, HasSubstr("# TYPE c_total counter\nc_total{code=\"OK\"} 3\nc_total{code=\"ABORTED\"} 4\n"));
  EXPECT_THAT(answer, HasSubstr("# TYPE h_seconds histogram\nh_seconds_count 0\nh_seconds_sum 0\n"
                                "h_seconds_bucket{le=\"0.3\"} 0\nh_seconds_bucket{le=\"7680\"} 0\n"
                                "h_seconds_bucket{le=\"+Inf\"} 0\n"));
  for (const char* name : {"process_cpu_seconds_total ", "process_start_time_seconds ",
                           "process_resident_memory_bytes ", "process_open_fds ", "process_max_fds "}) {
    EXPECT_THAT(answer, HasSubstr(absl::StrCat("\n", name)));
  }
  EXPECT_THAT(HttpGet((*server)->address(), "/other"), StartsWith("HTTP/1.1 404"));
}

TEST_F(MetricsServerTest, StopsAtOnce) {
  auto server = Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT(HttpGet((*server)->address(), "/metrics"), StartsWith("HTTP/1.1 200 OK\r\n"));
  const absl::Time begin = absl::Now();
  server->reset();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
}

TEST_F(MetricsServerTest, SaysWhichAddressIsTaken) {
  const auto server = Start("localhost:0");
  ASSERT_TRUE(server.ok()) << server.status();
  const auto second = Start((*server)->address());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr((*server)->address()));
}

}  // namespace
}  // namespace millrace
