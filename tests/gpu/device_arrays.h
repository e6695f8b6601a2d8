// Arrays in a GPU's memory for kernel tests. What lies beyond their rows is NaN, so that an op that reads it shows.
#pragma once

#include "tests/kernels/arrays.h"

namespace millrace {

// The GPU's stream, opened once; its workspace suffices for every test here.
inline Stream& GpuStream() {
  static Stream stream = [] {
    Stream s = Stream::OpenCuda(0);
    s.ReserveWorkspace(512u << 20);
    return s;
  }();
  return stream;
}

#define MILLRACE_NEEDS_GPU() \
  if (Stream::CountCuda() == 0) GTEST_SKIP() << "no GPU"

template <class T>
class OnGpu {
 public:
  explicit OnGpu(const Array<T>& host) : OnGpu(host.rows, host.cols) {
    GpuStream().Copy(buffer_.data(), host.values.data(), host.values.size() * sizeof(T));
  }
  explicit OnGpu(const std::vector<T>& host) : OnGpu(1, static_cast<int64_t>(host.size())) {
    if (!host.empty()) GpuStream().Copy(buffer_.data(), host.data(), host.size() * sizeof(T));
  }
  // All bytes 0xff: NaN, or an id that no table has.
  OnGpu(int64_t rows, int64_t cols)
      : rows_(rows), cols_(cols), buffer_(static_cast<size_t>((rows + 3) * cols) * sizeof(T) + 4096, GpuStream()) {
    const std::vector<uint8_t> poison(buffer_.bytes(), 0xff);
    GpuStream().Copy(buffer_.data(), poison.data(), poison.size());
  }

  Mat<T> mat() const { return {reinterpret_cast<T*>(buffer_.data()), rows_, cols_}; }
  Vec<T> vec() const { return {reinterpret_cast<T*>(buffer_.data()), rows_ * cols_}; }
  Array<T> Host() const {
    Array<T> host(rows_, cols_);
    GpuStream().Copy(host.values.data(), buffer_.data(), host.values.size() * sizeof(T));
    return host;
  }

 private:
  int64_t rows_;
  int64_t cols_;
  DeviceBuffer buffer_;
};

// Of two ways to sum `length` float terms whose magnitudes add up to `magnitude` and to round the result to A.
template <class A>
double Between(int64_t length, double magnitude, double expected) {
  return 2 * Tolerance<float>(length, magnitude) + (sizeof(A) == 2 ? std::abs(expected) * 0x1p-7 : 0);
}

inline Stream& CpuStream() {
  static Stream stream = [] {
    Stream s = Stream::OpenCpu(16);
    s.ReserveWorkspace(128u << 20);
    return s;
  }();
  return stream;
}

}  // namespace millrace
