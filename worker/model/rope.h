// Rotary position tables. Pure functions of the config, computed in double at start-up.
#pragma once

#include <vector>

#include "kernels/tensor.h"
#include "worker/model/model_config.h"

namespace millrace {

struct RopeFrequencies {
  std::vector<double> radians_per_token;  // [D / 2], of the pair (i, i + D/2)
  double amplitude = 1;                   // multiplies cos and sin
};

RopeFrequencies ComputeRopeFrequencies(const ModelConfig& config);

// cos[p, i] = amplitude * cos(p * radians_per_token[i]), sin likewise          cos, sin [P, D / 2]
void FillRopeTables(Mat<float> cos, Mat<float> sin, const RopeFrequencies& frequencies);

}  // namespace millrace
