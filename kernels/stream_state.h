// What a Stream owns: the device's own state derives from it (cpu/state.h). Lives and dies with its Stream.
#pragma once

#include <functional>

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
  virtual int64_t FreeBytes() const;
  // Memory that the host and the device see at one address.
  virtual std::byte* AllocateShared(size_t bytes);
  virtual Release release_shared() const;
  // See Graph and Stream::Mark. The host's ops have ended when they return: it records nothing and never waits.
  virtual void* Record(const std::function<void()>& work);
  virtual void Replay(void* graph);
  virtual void Discard(void* graph);
  virtual void Mark(int mark);
  virtual void AwaitMark(int mark);

  const Device device;
  DeviceBuffer workspace;
};

}  // namespace millrace
