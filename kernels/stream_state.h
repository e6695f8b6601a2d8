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

  const Device device;
  DeviceBuffer workspace;
};

}  // namespace millrace
