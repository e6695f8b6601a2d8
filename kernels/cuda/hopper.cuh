// What products and attention use of Hopper: barriers that count bytes, the bulk copy engine, clusters, and wgmma.
#pragma once

#include <cuda.h>

#include "kernels/cuda/device.cuh"

namespace millrace::cuda {

// --- Barriers in shared memory
// ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the barriers known to the copy engine and to the cluster.
__device__ __forceinline__ void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier, uint32_t count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// At the same barrier of another block of the cluster. What it guards is read by wgmma alone, so no fence of the whole
// cluster is needed; one would cost as much as a trip to memory.
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(block)
      : "memory");
}
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- Clusters
// -------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t RankInCluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Relaxed: orders no memory.
__device__ __forceinline__ void ArriveClusterRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void ArriveCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void WaitCluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// To the same address of another block of the cluster.
__device__ __forceinline__ void StoreAt(uint32_t block, uint32_t address, float a, float b, float c, float d) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n}\n" ::"r"(address),
      "r"(block), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

// --- Bulk copies
// ----------------------------------------------------------------------------------------------------------

// How long lines stay in the second-level cache: what is read once makes room first.
__device__ __forceinline__ uint64_t CachePolicy(bool read_once) {
  uint64_t first, normal;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return read_once ? first : normal;
}
// The map's box at (column, row); beyond the matrix are zeros. Its bytes count at the barrier.
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier,
                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}
// To the same place and barrier of every block whose bit is set.
__device__ __forceinline__ void CopyBoxToAll(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier,
                                             uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}
// The same of a map of four dimensions, from (column, 0, 0, group) on.
__device__ __forceinline__ void CopyGroups(uint32_t to, const CUtensorMap* map, int column, int group, uint32_t barrier,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, "
      "%3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(column), "r"(0), "r"(group), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void CopyGroupsToAll(uint32_t to, const CUtensorMap* map, int column, int group,
                                                uint32_t barrier, uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3, %3, %4}], [%5], %6, %7;" ::"r"(to),
      "l"(map), "r"(column), "r"(0), "r"(group), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}

// --- wgmma
// ----------------------------------------------------------------------------------------------------------------

// An operand in the 128-byte swizzle, 1024 bytes from eight rows of 128 bytes to the next eight. Contiguous in the
// summed dimension; or transposed, with `stride` bytes from one 64 columns to the next.
__device__ __forceinline__ uint64_t Descriptor(uint32_t address, uint32_t stride = 16) {
  return (uint64_t{address & 0x3ffffu} >> 4) | uint64_t{stride >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
__device__ __forceinline__ void FenceWarpgroup() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void CommitWarpgroup() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void WaitWarpgroup() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void SyncWarpgroup(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// The sums are written behind the compiler's back: it may not read them earlier than here.
template <int N>
__device__ __forceinline__ void Reread(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// The sums as operands, and their names in the instruction.
#define MILLRACE_SUMS4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define MILLRACE_SUMS8(i) MILLRACE_SUMS4(i), MILLRACE_SUMS4(i + 4)
#define MILLRACE_SUMS16(i) MILLRACE_SUMS8(i), MILLRACE_SUMS8(i + 8)
#define MILLRACE_SUMS32(i) MILLRACE_SUMS16(i), MILLRACE_SUMS16(i + 16)
#define MILLRACE_NAMES4 "%0, %1, %2, %3"
#define MILLRACE_NAMES8 MILLRACE_NAMES4 ", %4, %5, %6, %7"
#define MILLRACE_NAMES16 MILLRACE_NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MILLRACE_NAMES32 \
  MILLRACE_NAMES16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MILLRACE_NAMES64                                                             \
  MILLRACE_NAMES32                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MILLRACE_NAMES96                                                             \
  MILLRACE_NAMES64                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MILLRACE_WGMMA(columns, names, a_name, b_name, keep_name, ...)                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " keep_name                                                    \
               ", 0;\n"                                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" names "}, " a_name ", " b_name \
               ", p, 1, 1, 0, 0;\n}\n"                                                                          \
               : __VA_ARGS__                                                                                    \
               : "l"(a), "l"(b), "r"(keep))

// c[64, 2 N] = a[64, 16] * b[2 N, 16]^T (+ c unless !keep). Thread 4 g + t of warp w holds rows 16 w + g and + 8,
// columns 8 j + 2 t and + 1 in c[4 j .. 4 j + 3].
template <int N>
__device__ __forceinline__ void MultiplyWarpgroup(float (&c)[N], uint64_t a, uint64_t b, int keep) {
  if constexpr (N == 4) {
    MILLRACE_WGMMA("8", MILLRACE_NAMES4, "%4", "%5", "%6", MILLRACE_SUMS4(0));
  } else if constexpr (N == 8) {
    MILLRACE_WGMMA("16", MILLRACE_NAMES8, "%8", "%9", "%10", MILLRACE_SUMS8(0));
  } else if constexpr (N == 16) {
    MILLRACE_WGMMA("32", MILLRACE_NAMES16, "%16", "%17", "%18", MILLRACE_SUMS16(0));
  } else if constexpr (N == 32) {
    MILLRACE_WGMMA("64", MILLRACE_NAMES32, "%32", "%33", "%34", MILLRACE_SUMS32(0));
  } else if constexpr (N == 64) {
    MILLRACE_WGMMA("128", MILLRACE_NAMES64, "%64", "%65", "%66", MILLRACE_SUMS32(0), MILLRACE_SUMS32(32));
  } else {
    static_assert(N == 96);
    MILLRACE_WGMMA("192", MILLRACE_NAMES96, "%96", "%97", "%98", MILLRACE_SUMS32(0), MILLRACE_SUMS32(32),
                   MILLRACE_SUMS32(64));
  }
}

#undef MILLRACE_WGMMA

}  // namespace millrace::cuda
