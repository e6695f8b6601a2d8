// The only owner of device memory. Allocated at start-up, 64-byte aligned and zero; freed with its owner.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace millrace {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // An allocation that fails leaves data() null: the caller knows what did not fit and says so.
  DeviceBuffer(size_t bytes, Stream& stream);
  // Host memory that the device reads and writes at the same address.
  static DeviceBuffer Shared(size_t bytes, Stream& stream);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // A typed view at a byte offset, checked against the buffer's end.
  template <class T>
  T* At(size_t byte_offset, int64_t count) const {
    return static_cast<T*>(Range(byte_offset, static_cast<size_t>(count) * sizeof(T)));
  }

 private:
  void* Range(size_t byte_offset, size_t bytes) const;

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  void (*release_)(std::byte* data, size_t bytes) = nullptr;
};

}  // namespace millrace
