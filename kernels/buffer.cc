#include "kernels/buffer.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "kernels/check.h"
#include "kernels/stream_state.h"

namespace millrace {

std::byte* Stream::State::Allocate(size_t bytes) {
  // Anonymous pages are zero and come when touched; huge ones spare the TLB while weights stream through.
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  madvise(pages, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(pages);
}

Stream::State::Release Stream::State::release() const {
  return [](std::byte* data, size_t bytes) { munmap(data, bytes); };
}

std::byte* Stream::State::AllocateShared(size_t bytes) { return Stream::State::Allocate(bytes); }
Stream::State::Release Stream::State::release_shared() const { return Stream::State::release(); }

void Stream::State::Copy(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

DeviceBuffer::DeviceBuffer(size_t bytes, Stream& stream) : release_(stream.state().release()) {
  if (bytes == 0) return;
  data_ = stream.state().Allocate(bytes);
  if (data_ != nullptr) bytes_ = bytes;
}

DeviceBuffer DeviceBuffer::Shared(size_t bytes, Stream& stream) {
  DeviceBuffer buffer;
  buffer.release_ = stream.state().release_shared();
  buffer.data_ = stream.state().AllocateShared(bytes);
  if (buffer.data_ != nullptr) buffer.bytes_ = bytes;
  return buffer;
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), release_(other.release_) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(release_, other.release_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) release_(data_, bytes_);
}

void* DeviceBuffer::Range(size_t byte_offset, size_t bytes) const {
  MILLRACE_CHECK(byte_offset <= bytes_ && bytes <= bytes_ - byte_offset, "a view lies within its buffer",
                 static_cast<long long>(byte_offset), static_cast<long long>(bytes), static_cast<long long>(bytes_));
  return data_ + byte_offset;
}

}  // namespace millrace
