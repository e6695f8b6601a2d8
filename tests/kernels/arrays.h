// Arrays for kernel tests: filled from a seed, viewed as the ops want them, compared by bits or within a bound.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/buffer.h"
#include "kernels/cpu/isa.h"
#include "kernels/ops.h"

namespace millrace {

template <class T>
struct Array {
  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<T> values;

  Array(int64_t r, int64_t c) : rows(r), cols(c), values(static_cast<size_t>(r * c)) {}
  static Array Random(int64_t r, int64_t c, uint32_t seed, double deviation = 1) {
    Array a(r, c);
    std::mt19937 bits(seed);
    std::normal_distribution<double> normal(0, deviation);
    for (T& v : a.values) v = T(static_cast<float>(normal(bits)));
    return a;
  }
  Mat<T> mat() { return {values.data(), rows, cols}; }
  Mat<const T> view() const { return {values.data(), rows, cols}; }
  Vec<const T> vec() const { return {values.data(), rows * cols}; }
  double at(int64_t r, int64_t c) const { return static_cast<float>(values[static_cast<size_t>(r * cols + c)]); }
};

template <class T>
Vec<const T> View(const std::vector<T>& v) {
  return {v.data(), static_cast<int64_t>(v.size())};
}

struct Packed {
  std::vector<bf16> values;
  PackedWeight weight;

  Packed(const Array<bf16>& rows, Stream& stream)
      : values(PackedWeightBytes(rows.rows, rows.cols, Device::kCpu) / sizeof(bf16)),
        weight{values.data(), rows.rows, rows.cols} {
    PackRows(weight, 0, rows.view(), stream);
  }
};

// A stream whose workspace suffices for every test here.
inline Stream TestStream(int threads, cpu::Isa isa = cpu::BestIsa()) {
  Stream stream = Stream::OpenCpu(threads);
  cpu::ForceIsa(stream, isa);
  stream.ReserveWorkspace(8u << 20);
  return stream;
}

inline std::vector<cpu::Isa> SupportedIsas() {
  std::vector<cpu::Isa> isas;
  for (const cpu::Isa isa : {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    if (cpu::Supports(isa)) isas.push_back(isa);
  }
  return isas;
}

// Bound of the error of a float sum of `length` terms whose magnitudes add up to `magnitude`, rounded to A at the end:
// one rounding per term, and half a unit in the last place of A.
template <class A>
double Tolerance(int64_t length, double magnitude) {
  const double last = sizeof(A) == 2 ? 0x1p-8 : 0x1p-24;
  return magnitude * (static_cast<double>(length + 8) * 0x1p-24 + last) + 1e-30;
}

template <class T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace millrace
