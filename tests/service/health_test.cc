#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "service/health_service.h"
#include "service/readiness.h"
#include "service/server_limits.h"
#include "tests/health_client.h"

namespace millrace {
namespace {

class HealthTest : public testing::Test {
 protected:
  HealthTest() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(&health_);
    SetServerLimits({.max_message_bytes = 1 << 20, .max_streams = 2000, .keepalive_ms = 30'000}, &builder);
    server_ = builder.BuildAndStart();
    client_ = std::make_unique<HealthClient>(absl::StrCat("127.0.0.1:", port_));
  }

  HealthService health_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<HealthClient> client_;
};

TEST_F(HealthTest, KnowsTheProcessAndWhatItWasTold) {
  EXPECT_EQ(client_->Check(""), HealthCheckResponse::SERVING);
  EXPECT_EQ(client_->Check("a.Service"), HealthCheckResponse::SERVICE_UNKNOWN);
  health_.SetServing("a.Service", false);
  EXPECT_EQ(client_->Check("a.Service"), HealthCheckResponse::NOT_SERVING);
  health_.SetServing("a.Service", true);
  EXPECT_EQ(client_->Check("a.Service"), HealthCheckResponse::SERVING);
}

TEST_F(HealthTest, AWatchTellsEveryChangeAndEndsWithTheService) {
  const auto watch = client_->StartWatch("a.Service"), other = client_->StartWatch("");
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVICE_UNKNOWN);
  EXPECT_EQ(other->Next(), HealthCheckResponse::SERVING);
  health_.SetServing("a.Service", false);
  EXPECT_EQ(watch->Next(), HealthCheckResponse::NOT_SERVING);
  health_.SetServing("a.Service", true);
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVING);
  health_.SetServing("a.Service", true);  // no change, no message
  health_.Shutdown();
  for (const auto& each : {watch.get(), other.get()}) {
    EXPECT_EQ(each->Next(), HealthCheckResponse::NOT_SERVING);
    EXPECT_EQ(each->Next(), HealthCheckResponse::UNKNOWN);
  }
  const absl::Time begin = absl::Now();
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(30));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10)) << "no watch holds up a shutdown";
}

TEST_F(HealthTest, BoundsItsWatchers) {
  std::vector<std::unique_ptr<HealthClient::Watch>> watches;
  for (size_t i = 0; i < HealthService::kMaxWatchers; ++i) {
    watches.push_back(client_->StartWatch(""));
    ASSERT_EQ(watches.back()->Next(), HealthCheckResponse::SERVING);
  }
  EXPECT_EQ(client_->StartWatch("")->Next(), HealthCheckResponse::UNKNOWN);
  EXPECT_EQ(client_->Check(""), HealthCheckResponse::SERVING);
}

TEST_F(HealthTest, ReadinessFollowsTheSampleTheWorkAndTheDrain) {
  std::atomic<bool> ready{false}, pending{false};
  std::atomic<uint64_t> steps{0};
  Readiness readiness(&health_, "a.Service", [&] {
    return Readiness::Sample{ready, {.pending = pending, .steps = steps}};
  });
  const auto watch = client_->StartWatch("a.Service");
  EXPECT_EQ(watch->Next(), HealthCheckResponse::NOT_SERVING);
  ready = true;
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVING);

  pending = true;
  const absl::Time begin = absl::Now();
  EXPECT_EQ(watch->Next(), HealthCheckResponse::NOT_SERVING);  // no step
  EXPECT_GE(absl::Now() - begin, absl::Seconds(2));
  EXPECT_TRUE(readiness.stuck());
  ++steps;
  EXPECT_EQ(watch->Next(), HealthCheckResponse::SERVING);

  readiness.Drain();
  EXPECT_EQ(watch->Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(readiness.ready());
  EXPECT_EQ(client_->Check(""), HealthCheckResponse::SERVING) << "a process that drains is alive";
}

}  // namespace
}  // namespace millrace
