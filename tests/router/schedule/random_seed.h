// The seed of a property test: MILLRACE_SEED, or a fixed one. Printed, so that a failure can be repeated.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace millrace {

inline uint64_t TestSeed(uint64_t fixed) {
  const char* given = std::getenv("MILLRACE_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : fixed;
  std::printf("seed %llu (MILLRACE_SEED overrides)\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace millrace
