// What a Stream owns: the device's own state derives from it (cpu/state.h). Lives and dies with its Stream.
#pragma once

#include "kernels/buffer.h"
#include "kernels/stream.h"

namespace millrace {

struct Stream::State {
  explicit State(Device d) : device(d) {}
  virtual ~State() = default;
  virtual int num_threads() const = 0;
  virtual void Synchronize() = 0;

  // Zeroed memory, null where it does not fit; `release` frees it, also after the state is gone. Here: the host's
  // memory.
  using Release = void (*)(std::byte* data, size_t bytes);
  virtual std::byte* Allocate(size_t bytes);
  virtual Release release() const;
  virtual void Copy(void* to, const void* from, size_t bytes);

  const Device device;
  DeviceBuffer workspace;
};

}  // namespace millrace
