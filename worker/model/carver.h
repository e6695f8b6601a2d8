// Cuts one allocation into 64-byte aligned pieces, in order. A layout is written once and carved twice: from null to
// learn its size, then from the memory. Lives for one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"

namespace millrace {

class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(memory) {}

  std::byte* TakeBytes(size_t bytes) {
    std::byte* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (bytes + 63) / 64 * 64;
    return piece;
  }
  template <class T>
  Vec<T> TakeVec(int64_t size) {
    return {reinterpret_cast<T*>(TakeBytes(static_cast<size_t>(size) * sizeof(T))), size};
  }
  template <class T>
  Mat<T> TakeMat(int64_t rows, int64_t cols) {
    return {TakeVec<T>(rows * cols).data, rows, cols};
  }

  size_t used() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

}  // namespace millrace
