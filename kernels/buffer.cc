#include "kernels/buffer.h"

#include <sys/mman.h>

#include <utility>

#include "kernels/check.h"

namespace millrace {

DeviceBuffer::DeviceBuffer(size_t bytes, Stream& stream) : device_(stream.device()) {
  MILLRACE_CHECK(device_ == Device::kCpu, "this build has no other device");
  if (bytes == 0) return;
  // Anonymous pages are zero and come when touched; huge ones spare the TLB while weights stream through.
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return;
  madvise(pages, bytes, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(pages);
  bytes_ = bytes;
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), device_(other.device_) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void* DeviceBuffer::Range(size_t byte_offset, size_t bytes) const {
  MILLRACE_CHECK(byte_offset <= bytes_ && bytes <= bytes_ - byte_offset, "a view lies within its buffer",
                 static_cast<long long>(byte_offset), static_cast<long long>(bytes), static_cast<long long>(bytes_));
  return data_ + byte_offset;
}

}  // namespace millrace
