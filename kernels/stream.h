// Where work runs: one device, its order of execution, and the scratch memory its ops share. Opened at start-up, moved,
// never copied; used by one thread (a worker's engine thread). The CPU's stream owns the compute threads and runs each
// op to its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace millrace {

enum class Device : uint8_t { kCpu, kCuda };

// The exit code of a process whose device failed: nothing in it can go on, and no one else's fault is mistaken for it.
inline constexpr int kDeviceFailureExit = 3;

class Stream {
 public:
  // num_threads compute threads, the caller's included; >= 1.
  static Stream OpenCpu(int num_threads);
  // GPUs that this build can use: 0 without CUDA kernels or without a GPU.
  static int CountCuda();
  // REQUIRES: 0 <= ordinal < CountCuda()
  static Stream OpenCuda(int ordinal);

  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  ~Stream();

  Device device() const;
  int num_threads() const;

  // Grows the scratch memory shared by the ops on this stream. Start-up only; ops check that it suffices and never grow
  // it.
  void ReserveWorkspace(size_t bytes);
  std::byte* workspace() const;
  size_t workspace_bytes() const;

  // Copies between host memory and the device's, either way, after the work given so far; returns when done.
  void Copy(void* to, const void* from, size_t bytes);

  // Returns when all work given to the stream has ended.
  void Synchronize();

  // Notes the present end of the stream's work under a number, 0 … kMarks - 1; AwaitMark returns when what was noted
  // last under it has ended.
  static constexpr int kMarks = 3;
  void Mark(int mark);
  void AwaitMark(int mark);

  // Memory that is left on the device.
  int64_t FreeBytes() const;

  struct State;  // the device's own: kernels/cpu or kernels/cuda
  State& state() const { return *state_; }

 private:
  explicit Stream(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace millrace
