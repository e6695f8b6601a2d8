// The compute threads of a CPU stream: n - 1 threads that live as long as the pool, the caller being the n-th. Used by
// one thread. Run hands out one region at a time and returns when every thread has ended its part.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace millrace::cpu {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // fn(begin, end, thread) over a fixed split of [0, count); at most one thread per `grain` items is given work.
  template <class Fn>
  void ParallelFor(int64_t count, int64_t grain, const Fn& fn) {
    const int64_t wanted = (count + grain - 1) / grain;
    const int64_t parts = wanted < num_threads() ? wanted : num_threads();
    if (parts <= 1) {
      if (count > 0) fn(int64_t{0}, count, 0);
      return;
    }
    const auto part = [&](int thread) {
      if (thread < parts) fn(count * thread / parts, count * (thread + 1) / parts, thread);
    };
    Run([](const void* p, int thread) { (*static_cast<const std::remove_reference_t<decltype(part)>*>(p))(thread); },
        &part);
  }

 private:
  using Body = void (*)(const void* context, int thread);

  void Run(Body body, const void* context);
  void Work(int thread);

  // Written by the caller before `region_` grows, read by the threads after.
  Body body_ = nullptr;  // null: end
  const void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> region_{0};
  alignas(64) std::atomic<uint32_t> running_{0};
  std::vector<std::thread> threads_;
};

}  // namespace millrace::cpu
