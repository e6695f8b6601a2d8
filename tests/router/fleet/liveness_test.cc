#include "router/fleet/liveness.h"

#include "gtest/gtest.h"

namespace millrace {
namespace {

constexpr Time kMs = 1000;
constexpr Time kTick = Liveness::kLookEvery;
constexpr std::optional<double> kIdle = std::nullopt;

// Looks every tick from `from` on; the first time at which the verdict is not OK, or kNever up to `until`.
Time DiesAt(Liveness* liveness, Time from, Time until, std::optional<double> work, absl::StatusCode* why = nullptr) {
  for (Time now = from; now <= until; now += kTick) {
    const absl::Status status = liveness->Look(now, work);
    if (status.ok()) continue;
    if (why != nullptr) *why = status.code();
    return now;
  }
  return kNever;
}

TEST(Liveness, ASilentWorkerIsDeadAfterTheLimit) {
  Liveness liveness(0);
  liveness.Heard(100 * kMs, 0, 0);
  absl::StatusCode why = absl::StatusCode::kOk;
  const Time died = DiesAt(&liveness, kTick, 60'000 * kMs, kIdle, &why);
  EXPECT_EQ(why, absl::StatusCode::kUnavailable);
  EXPECT_GE(died, 100 * kMs + Liveness::kSilenceLimit);
  EXPECT_LE(died, 100 * kMs + Liveness::kSilenceLimit + kTick);
}

TEST(Liveness, HeartbeatsKeepAnIdleWorkerAlive) {
  Liveness liveness(0);
  for (Time now = kTick; now < 600'000 * kMs; now += kTick) {
    liveness.Heard(now, 7, 0);
    ASSERT_TRUE(liveness.Look(now, kIdle).ok()) << now;
  }
}

// Heartbeats come, and no step ends.
Time StuckFor(Liveness* liveness, Time from, std::optional<double> work) {
  for (Time now = from + kTick; now < from + 600'000 * kMs; now += kTick) {
    liveness->Heard(now, 5, 0);
    const absl::Status status = liveness->Look(now, work);
    if (status.ok()) continue;
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    return now - from;
  }
  return kNever;
}

TEST(Liveness, AWorkerThatHasWorkMustEndSteps) {
  Liveness quick(0);
  quick.Heard(0, 5, 10'000);
  const Time limit = Liveness::kLeastProgressLimit;
  EXPECT_GE(StuckFor(&quick, 0, 0.0), limit);

  Liveness exact(0);
  exact.Heard(0, 5, 10'000);
  EXPECT_LE(StuckFor(&exact, 0, 0.0), limit + 2 * kTick) << "a tick until the work is seen, and one until the verdict";
}

TEST(Liveness, PatienceGrowsWithTheUsualStepAndThePrefillThatLiesThere) {
  Liveness slow(0);
  for (uint64_t step = 1; step <= 5; ++step) slow.Heard(0, step, 400'000);
  EXPECT_GE(StuckFor(&slow, 0, 0.0), 20 * 400 * kMs);

  Liveness loaded(0);
  EXPECT_GE(StuckFor(&loaded, 0, 4.0), 12'000 * kMs);

  Liveness absurd(0);
  absurd.Heard(0, 5, UINT32_MAX);
  EXPECT_LE(StuckFor(&absurd, 0, 1e18), Liveness::kMostProgressLimit + 2 * kTick);
}

TEST(Liveness, IdleTimeDoesNotCountAsLackOfProgress) {
  Liveness liveness(0);
  liveness.Heard(0, 5, 10'000);
  EXPECT_EQ(StuckFor(&liveness, 0, kIdle), kNever);
  EXPECT_GE(StuckFor(&liveness, 600'000 * kMs, 0.0), Liveness::kLeastProgressLimit);
}

TEST(Liveness, ADetectorThatWasStoppedItselfCountsAnew) {
  Liveness liveness(0);
  liveness.Heard(kTick, 5, 10'000);
  ASSERT_TRUE(liveness.Look(kTick, 0.0).ok());
  const Time resumed = 40'000 * kMs;
  EXPECT_TRUE(liveness.Look(resumed, 0.0).ok()) << "39 s of silence, none of which it could have heard";
  const Time died = DiesAt(&liveness, resumed + kTick, resumed + 60'000 * kMs, 0.0);
  EXPECT_EQ(died, resumed + Liveness::kSilenceLimit);
}

TEST(Liveness, BeingALittleLateChangesNoVerdict) {
  Liveness liveness(0);
  const Time late = kTick + Liveness::kSilenceLimit / 2;
  ASSERT_TRUE(liveness.Look(late, kIdle).ok());
  EXPECT_FALSE(liveness.Look(2 * late, kIdle).ok());
}

}  // namespace
}  // namespace millrace
