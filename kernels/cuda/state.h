// The CUDA stream's own state: one GPU and one queue of its work. Lives and dies with its Stream; used by one thread.
#pragma once

#include <cuda_runtime.h>

#include "kernels/stream_state.h"

namespace millrace::cuda {

// Ends the process with kDeviceFailureExit, naming the call: a GPU that fails does not come back within this process.
void CheckCuda(cudaError_t error, const char* call);

// The same, naming the kernel and its grid.
[[noreturn]] void LaunchFailed(cudaError_t error, const void* kernel, dim3 grid, int threads, size_t shared_bytes);

struct State : Stream::State {
  explicit State(int gpu);
  ~State() override;
  int num_threads() const override { return 1; }
  void Synchronize() override;
  std::byte* Allocate(size_t bytes) override;
  Release release() const override;
  void Copy(void* to, const void* from, size_t bytes) override;
  int64_t FreeBytes() const override;
  std::byte* AllocateShared(size_t bytes) override;
  Release release_shared() const override;
  void* Record(const std::function<void()>& work) override;
  void Replay(void* graph) override;
  void Discard(void* graph) override;
  void Mark(int mark) override;
  void AwaitMark(int mark) override;

  static constexpr int kNumCounters = 1 << 14;

  const int ordinal;
  int num_sms = 0;
  cudaStream_t queue = nullptr;
  cudaEvent_t marks[Stream::kMarks] = {};
  int* counters = nullptr;  // [kNumCounters] zeros between kernels: who counts there leaves zeros
};

inline State& StateOf(const Stream& stream) { return static_cast<State&>(stream.state()); }

}  // namespace millrace::cuda
