// The CPU stream's own state: its threads and the build of the kernels it uses. Lives and dies with its Stream.
#pragma once

#include "kernels/cpu/isa.h"
#include "kernels/cpu/threads.h"
#include "kernels/stream_state.h"

namespace millrace::cpu {

struct State : Stream::State {
  explicit State(int num_threads)
      : Stream::State(Device::kCpu), threads(num_threads), kernels(&KernelsFor(BestIsa())) {}
  int num_threads() const override { return threads.num_threads(); }
  void Synchronize() override {}  // every op has ended when it returns

  ThreadPool threads;
  const Kernels* kernels;
};

inline State& StateOf(Stream& stream) { return static_cast<State&>(stream.state()); }

}  // namespace millrace::cpu
