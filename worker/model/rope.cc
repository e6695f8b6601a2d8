#include "worker/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace millrace {
namespace {

constexpr double kTwoPi = 2 * std::numbers::pi;

// Llama 3.1 (as in its reference code): long waves are slowed by `factor`, short ones kept, those between blended by
// how many turns they make over the original length.
double Llama3Frequency(double frequency, const RopeScaling& scaling) {
  const double turns = scaling.original_max_position * frequency / kTwoPi;
  const double blend =
      std::clamp((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0);
  return frequency * (blend + (1 - blend) / scaling.factor);
}

// YaRN (Peng et al., arXiv 2309.00071, 3.2), with the ramp over the index of the pair between the whole indices that
// make beta_fast and beta_slow turns over the original length, as transformers computes it.
void ScaleYarn(std::vector<double>& frequencies, const ModelConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  const auto index_of_turns = [&](double turns) {
    return config.head_dim * std::log(scaling.original_max_position / (turns * kTwoPi)) /
           (2 * std::log(config.rope_theta));
  };
  const double low = std::max(std::floor(index_of_turns(scaling.beta_fast)), 0.0);
  double high = std::min(std::ceil(index_of_turns(scaling.beta_slow)), config.head_dim - 1.0);
  if (high == low) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double slowed = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] *= slowed / scaling.factor + (1 - slowed);
  }
}

double YarnAmplitude(const RopeScaling& scaling) {
  const auto amplitude = [&](double mscale) {
    return scaling.factor <= 1 ? 1 : 0.1 * mscale * std::log(scaling.factor) + 1;
  };
  if (scaling.attention_factor != 0) return scaling.attention_factor;
  if (scaling.mscale != 0 && scaling.mscale_all_dim != 0)
    return amplitude(scaling.mscale) / amplitude(scaling.mscale_all_dim);
  return amplitude(1);
}

}  // namespace

RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config) {
  RopeFrequencies result;
  std::vector<double>& frequencies = result.radians_per_token;
  for (int i = 0; i < config.head_dim / 2; ++i)
    frequencies.push_back(std::pow(config.rope_theta, -2.0 * i / config.head_dim));
  switch (config.rope_scaling.type) {
    case RopeScaling::Type::kNone:
      break;
    case RopeScaling::Type::kLinear:
      for (double& frequency : frequencies) frequency /= config.rope_scaling.factor;
      break;
    case RopeScaling::Type::kLlama3:
      for (double& frequency : frequencies) frequency = Llama3Frequency(frequency, config.rope_scaling);
      break;
    case RopeScaling::Type::kYarn:
      ScaleYarn(frequencies, config);
      result.amplitude = YarnAmplitude(config.rope_scaling);
      break;
  }
  return result;
}

void FillRopeTables(Mat<float> cos, Mat<float> sin, const RopeFrequencies& frequencies) {
  for (int64_t position = 0; position < cos.rows; ++position) {
    for (int64_t i = 0; i < cos.cols; ++i) {
      const double angle = static_cast<double>(position) * frequencies.radians_per_token[static_cast<size_t>(i)];
      cos.row(position)[i] = static_cast<float>(frequencies.amplitude * std::cos(angle));
      sin.row(position)[i] = static_cast<float>(frequencies.amplitude * std::sin(angle));
    }
  }
}

}  // namespace millrace
