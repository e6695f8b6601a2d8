// Passes over a row of logits, and the random words for it.
#include "kernels/cpu/builds.h"
#include "kernels/cpu/lanes.h"

namespace millrace::cpu::MILLRACE_ISA {

bool IsFinite(const float* x, int64_t count) {
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found |= static_cast<uint32_t>((std::bit_cast<uint32_t>(x[i]) & 0x7f800000u) == 0x7f800000u);
  }
  return found == 0;
}

float MaxOf(const float* x, int64_t count) {
  F16 max = Broadcast(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) max = Max(max, Load(x + i));
  float largest = Largest(max);
  for (; i < count; ++i) largest = largest > x[i] ? largest : x[i];
  return largest;
}

double ExpSum(float* y, const float* x, float shift, int64_t count) {
  double sums[kLanes] = {};
  ForLanes(count, [&](int64_t i, auto load, auto store) {
    const F16 e = Exp(Sub(load(x + i), Broadcast(shift)));
    if (y != nullptr) store(y + i, e);
    float lanes[kLanes];
    Store(lanes, e);
    const int64_t n = count - i;
    for (int64_t j = 0; j < (n < kLanes ? n : kLanes); ++j) sums[j] += lanes[j];
  });
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

void PhiloxGroups(uint32_t* words, uint64_t seed, int64_t position, uint64_t first_group) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t group = first_group + static_cast<uint64_t>(i);
    c0[i] = static_cast<uint32_t>(group);
    c1[i] = static_cast<uint32_t>(group >> 32);
    c2[i] = static_cast<uint32_t>(position);
    c3[i] = static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32);
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t a = uint64_t{0xd2511f53u} * c0[i], b = uint64_t{0xcd9e8d57u} * c2[i];
      c0[i] = static_cast<uint32_t>(b >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<uint32_t>(b);
      c2[i] = static_cast<uint32_t>(a >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<uint32_t>(a);
    }
  }
  for (int i = 0; i < kLanes; ++i) {
    words[4 * i] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

}  // namespace millrace::cpu::MILLRACE_ISA
