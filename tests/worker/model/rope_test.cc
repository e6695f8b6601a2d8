// The formulas against numbers worked out apart from the code: closed forms of the papers at chosen pairs.
#include "worker/model/rope.h"

#include <cmath>
#include <numbers>

#include "gtest/gtest.h"

namespace millrace {
namespace {

constexpr double kPi = std::numbers::pi;

ModelConfig Config(RopeScaling scaling) {
  ModelConfig config;
  config.head_dim = 128;
  config.rope_theta = 10000;
  config.rope_scaling = scaling;
  return config;
}

TEST(Rope, PlainFrequenciesAreAGeometricSequence) {
  const RopeFrequencies rope = ComputeRopeFrequencies(Config({}));
  ASSERT_EQ(rope.radians_per_token.size(), 64u);
  EXPECT_DOUBLE_EQ(rope.radians_per_token[0], 1);
  EXPECT_NEAR(rope.radians_per_token[16], 0.1, 1e-15);
  EXPECT_NEAR(rope.radians_per_token[32], 0.01, 1e-16);
  EXPECT_NEAR(rope.radians_per_token[48], 0.001, 1e-17);
  EXPECT_EQ(rope.amplitude, 1);
}

TEST(Rope, LinearScalingStretchesEveryWave) {
  const RopeFrequencies rope = ComputeRopeFrequencies(Config({.type = RopeScaling::Type::kLinear, .factor = 4}));
  EXPECT_DOUBLE_EQ(rope.radians_per_token[0], 0.25);
  EXPECT_NEAR(rope.radians_per_token[32], 0.0025, 1e-17);
}

// Original length 2000 pi: the pair of frequency f makes 1000 f turns over it. Pair 0 makes 1000 (kept), pair 48 one
// (on the edge of the slowed), pair 36 makes 10^0.75 = 5.62 (kept), pair 40 10^0.5 = 3.16 of the band 1 to 4.
TEST(Rope, Llama3SlowsLongWavesKeepsShortOnesAndBlendsBetween) {
  const RopeFrequencies rope = ComputeRopeFrequencies(Config({.type = RopeScaling::Type::kLlama3,
                                                              .factor = 8,
                                                              .original_max_position = 2000 * kPi,
                                                              .low_freq_factor = 1,
                                                              .high_freq_factor = 4}));
  EXPECT_DOUBLE_EQ(rope.radians_per_token[0], 1);
  EXPECT_NEAR(rope.radians_per_token[36], std::pow(10, -2.25), 1e-15);
  const double smooth = (std::sqrt(10.0) - 1) / 3;
  EXPECT_NEAR(rope.radians_per_token[40], (1 - smooth) * std::pow(10, -2.5) / 8 + smooth * std::pow(10, -2.5), 1e-15);
  EXPECT_NEAR(rope.radians_per_token[48], 0.001 / 8, 1e-12);
  EXPECT_NEAR(rope.radians_per_token[60], std::pow(10, -3.75) / 8, 1e-16);
}

// With theta 10^4 and D 128, pair i makes L / (2 pi) 10^(-i / 16) turns over L, so 32 turns are at i = 16 log10(L / 64
// pi) and one at i = 16 log10(L / 2 pi). L = 64 pi 10^1.01 puts them at 16.16 and 40.24: the ramp runs from 16 to 41.
TEST(Rope, YarnRampsBetweenThePairsThatMakeManyTurnsAndOne) {
  const RopeFrequencies rope = ComputeRopeFrequencies(
      Config({.type = RopeScaling::Type::kYarn, .factor = 16, .original_max_position = 64 * kPi * std::pow(10, 1.01)}));
  const auto plain = [](int i) { return std::pow(10, -i / 16.0); };
  EXPECT_NEAR(rope.radians_per_token[0], 1, 1e-15);
  EXPECT_NEAR(rope.radians_per_token[16], plain(16), 1e-15);
  EXPECT_NEAR(rope.radians_per_token[26], plain(26) * (0.6 + 0.4 / 16), 1e-15);
  EXPECT_NEAR(rope.radians_per_token[41], plain(41) / 16, 1e-16);
  EXPECT_NEAR(rope.radians_per_token[63], plain(63) / 16, 1e-18);
  EXPECT_NEAR(rope.amplitude, 1.2772588722239782, 1e-12) << "0.1 ln 16 + 1";
}

TEST(Rope, YarnsAmplitudeMayBeGiven) {
  RopeScaling scaling = {.type = RopeScaling::Type::kYarn, .factor = 40, .original_max_position = 4096};
  EXPECT_NEAR(ComputeRopeFrequencies(Config(scaling)).amplitude, 1.3688879454113936, 1e-12);
  scaling.mscale = scaling.mscale_all_dim = 0.707;
  EXPECT_DOUBLE_EQ(ComputeRopeFrequencies(Config(scaling)).amplitude, 1);
  scaling.mscale = 1;
  EXPECT_NEAR(ComputeRopeFrequencies(Config(scaling)).amplitude, 1.3688879454113936 / 1.2608037774058553, 1e-12);
  scaling.attention_factor = 1.5;
  EXPECT_DOUBLE_EQ(ComputeRopeFrequencies(Config(scaling)).amplitude, 1.5);
}

TEST(Rope, TablesHoldTheAmplitude) {
  float cos[6], sin[6];
  FillRopeTables({cos, 3, 2}, {sin, 3, 2}, {.radians_per_token = {kPi / 2, kPi / 4}, .amplitude = 2});
  EXPECT_FLOAT_EQ(cos[0], 2);
  EXPECT_FLOAT_EQ(sin[0], 0);
  EXPECT_NEAR(cos[2], 0, 1e-6);
  EXPECT_FLOAT_EQ(sin[2], 2);
  EXPECT_FLOAT_EQ(cos[3], std::sqrt(2.0f));
  EXPECT_FLOAT_EQ(cos[4], -2);
  EXPECT_FLOAT_EQ(sin[5], 2);
}

}  // namespace
}  // namespace millrace
