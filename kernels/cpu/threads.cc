#include "kernels/cpu/threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace millrace::cpu {
namespace {

constexpr int kSpins = 1000;

// Waits until `value` is no longer `old`. The short spin covers the gap between two regions of a step.
void WaitWhile(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { Work(thread); });
}

ThreadPool::~ThreadPool() {
  body_ = nullptr;
  region_.fetch_add(1, std::memory_order_release);
  region_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Run(Body body, const void* context) {
  body_ = body;
  context_ = context;
  running_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
  region_.fetch_add(1, std::memory_order_release);
  region_.notify_all();
  body(context, 0);
  for (uint32_t left = running_.load(std::memory_order_acquire); left != 0;
       left = running_.load(std::memory_order_acquire)) {
    WaitWhile(running_, left);
  }
}

void ThreadPool::Work(int thread) {
  for (uint32_t region = 0;; ++region) {
    WaitWhile(region_, region);
    if (body_ == nullptr) return;
    body_(context_, thread);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
  }
}

}  // namespace millrace::cpu
