// Gumbel noise from one random word, in double and in elementary operations alone, so that every device and library
// gives the same bits.
#pragma once

#include <bit>
#include <cstdint>

namespace millrace {

// ln x of a positive normal x, to within a few ulp: x = 2^e m with m in [sqrt(1/2), sqrt(2)), ln m = 2 atanh((m - 1) /
// (m + 1)).
constexpr double NaturalLog(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint64_t sqrt_half = 0x3fe6a09e667f3bcdu;
  const int64_t e = static_cast<int64_t>(bits - sqrt_half) >> 52;
  const double m = std::bit_cast<double>(bits - (static_cast<uint64_t>(e) << 52));
  const double s = (m - 1) / (m + 1), t = s * s;
  double sum = 0;
  for (int n = 21; n >= 3; n -= 2) sum = (sum + 1.0 / n) * t;
  return static_cast<double>(e) * 0.693147180559945309417 + 2 * (s + s * sum);
}

// -ln(-ln u), u = (word + 1/2) / 2^32: between -3.14 and 22.88, and grows with the word.
constexpr double GumbelNoise(uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return -NaturalLog(-NaturalLog(u));
}
inline constexpr double kLargestGumbelNoise = 22.88;

}  // namespace millrace
