// The stream that a test's models run on: the CPU's, or the first GPU's where MILLRACE_TEST_DEVICE is "cuda".
#pragma once

#include <cstdlib>
#include <string_view>

#include "kernels/stream.h"

namespace millrace {

inline bool TestsRunOnGpu() {
  const char* device = std::getenv("MILLRACE_TEST_DEVICE");
  return device != nullptr && std::string_view(device) == "cuda";
}

inline Stream OpenTestStream(int threads) { return TestsRunOnGpu() ? Stream::OpenCuda(0) : Stream::OpenCpu(threads); }

}  // namespace millrace
