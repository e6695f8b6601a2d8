// A ring of slots in shared memory through which one warp feeds K and V to the others: bulk copies that report to
// mbarriers, slots given back by those who read them.
#pragma once

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/hopper.cuh"

namespace millrace::cuda {

__device__ __forceinline__ void BulkCopy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

template <int kSlots, int kSlotBytes>
struct Ring {
  uint32_t buffers;
  uint32_t barriers;  // full[kSlots], empty[kSlots]
  int index = 0;
  uint32_t phase = 0;

  static constexpr int kBytes = kSlots * kSlotBytes;
  static constexpr int kBarrierBytes = 2 * kSlots * 8;

  __device__ uint32_t Buffer() const { return buffers + static_cast<uint32_t>(index * kSlotBytes); }
  __device__ uint32_t Full() const { return barriers + static_cast<uint32_t>(index * 8); }
  __device__ uint32_t Empty() const { return barriers + static_cast<uint32_t>((kSlots + index) * 8); }
  __device__ void AwaitFull() const { WaitBarrier(Full(), phase); }
  __device__ void AwaitEmpty() const { WaitBarrier(Empty(), phase ^ 1); }
  // count <= kSlots
  __device__ void Advance(int count = 1) {
    index += count;
    if (index >= kSlots) {
      index -= kSlots;
      phase ^= 1;
    }
  }
  __device__ Ring Ahead(int count) const {
    Ring ahead = *this;
    ahead.Advance(count);
    return ahead;
  }
  // One thread; the others may touch the barriers after the block's next barrier.
  __device__ void Init(uint32_t readers) const {
    for (int i = 0; i < kSlots; ++i) {
      InitBarrier(barriers + static_cast<uint32_t>(i * 8), 1);
      InitBarrier(barriers + static_cast<uint32_t>((kSlots + i) * 8), readers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

}  // namespace millrace::cuda
