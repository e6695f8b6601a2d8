// y[m, n] = sum over c of x[m, c] * w[n, c] + bias[n] for many rows. A block owns 128 x 128 outputs; all its threads
// bring 64-wide tiles of x and w to a ring in shared memory (cp.async, the tensor cores' 128-byte swizzle), and each of
// its two warpgroups multiplies 64 rows by wgmma into 64 registers a thread, which are added to 64 totals at the end of
// a segment. Bound: 2 FLOPs per row, input and output. H200, 2026-11-30, share of 790 TFLOP/s: 4096 -> 28672 59 % at M
// = 2048 and 8192, 51 % at 256; 1024 -> 4096 42 % at 2048. Blocks 192 outputs wide spill registers and are slower.
#include "kernels/cuda/linear.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr int kThreads = 2 * kWarpgroup;
constexpr int kBlockRows = 128;
constexpr int kBlockOutputs = 128;
constexpr int kOperandBytes = 128 * kTileBytes;  // of x or of w, one stage
constexpr int kStages = 6;
constexpr int kSharedBytes = kStages * 2 * kOperandBytes + 1024;  // and room to align
constexpr int kRowTilesAtOnce =
    16;  // row tiles that pass over a column of weights together, from the second-level cache

// A K-major operand in the 128-byte swizzle: address, 1024 bytes from eight rows to the next.
__device__ __forceinline__ uint64_t Descriptor(uint32_t address) {
  return (uint64_t{address & 0x3ffffu} >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

__device__ __forceinline__ void FenceWarpgroup() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void CommitWarpgroup() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void WaitWarpgroup() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The sums are written behind the compiler's back: it may not read them earlier than here.
__device__ __forceinline__ void Reread(float (&c)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// c[64, 128] = a[64, 16] * b[128, 16]^T (+ c unless !keep).
__device__ __forceinline__ void MultiplyWarpgroup(float (&c)[64], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;\n}\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
        "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
        "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
        "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),
        "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),
        "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),
        "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
      : "l"(a), "l"(b), "r"(keep));
}

// Eight threads bring one line.
constexpr int kRowsAtOnce = kThreads / 8, kLoads = 128 / kRowsAtOnce;
template <bool kPacked>
using Source = ChunkSource<kLoads, kRowsAtOnce, kPacked>;

// `to` is this thread's first chunk of the stage.
template <bool kPacked>
__device__ __forceinline__ void LoadStage(uint32_t to, const Source<kPacked>& x, const Source<kPacked>& w,
                                          int64_t tile) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    x.Load(i, to + static_cast<uint32_t>(i * kRowsAtOnce * kTileBytes), tile);
    w.Load(i, to + static_cast<uint32_t>(i * kRowsAtOnce * kTileBytes + kOperandBytes), tile);
  }
}

// Thread 4 g + t of warp w of a warpgroup holds rows 16 w + g and + 8, outputs 8 j + 2 t and + 1 in c[4 j .. 4 j + 3].
template <class Y>
__device__ __forceinline__ void StoreTile(const LinearArgs& args, const float (&total)[64], int64_t first_m,
                                          int64_t first_n) {
  const int thread = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t row = first_m + static_cast<int>(threadIdx.x) / kWarp * 16 + thread / 4;
  const bool pairs = args.n % 2 == 0;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int64_t n = first_n + j * 8 + thread % 4 * 2;
    if (n >= args.n) continue;
    const bool both = n + 1 < args.n;
    const float bias0 = args.bias != nullptr ? args.bias[n] : 0.0f;
    const float bias1 = args.bias != nullptr && both ? args.bias[n + 1] : 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= args.m) continue;
      Y* const y = static_cast<Y*>(args.y) + (row + half * 8) * args.n + n;
      const float a = args.bias != nullptr ? total[4 * j + 2 * half] + bias0 : total[4 * j + 2 * half];
      const float b = args.bias != nullptr ? total[4 * j + 2 * half + 1] + bias1 : total[4 * j + 2 * half + 1];
      if (pairs) {
        StoreOutputs(y, a, b);
      } else {
        StoreOutput(y, a);
        if (both) StoreOutput(y + 1, b);
      }
    }
  }
}

template <class Y, bool kPacked>
__global__ void __launch_bounds__(kThreads, 1)
    ManyRowsKernel(LinearArgs args, int64_t row_tiles, int64_t output_tiles) {
  AwaitInputs();
  extern __shared__ uint8_t shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023u) & ~1023u;
  const int64_t group = int64_t{blockIdx.x} / (kRowTilesAtOnce * output_tiles);
  const int64_t in_group = int64_t{blockIdx.x} % (kRowTilesAtOnce * output_tiles);
  const int64_t group_rows = min(int64_t{kRowTilesAtOnce}, row_tiles - group * kRowTilesAtOnce);
  const int64_t first_m = (group * kRowTilesAtOnce + in_group % group_rows) * kBlockRows;
  const int64_t first_n = in_group / group_rows * kBlockOutputs;
  const int64_t tiles = TilesOf(args.k), per_segment = TilesPerSegment(args.k);
  const uint32_t my_rows = static_cast<uint32_t>(static_cast<int>(threadIdx.x) / kWarpgroup * 64 * kTileBytes);

  const int chunk = static_cast<int>(threadIdx.x) % 8, row = static_cast<int>(threadIdx.x) / 8;
  const Source<kPacked> x(args.x, first_m + row, args.m, args.k, chunk),
      w(args.w, first_n + row, args.n, args.k, chunk);
  const uint32_t mine = Swizzled(ring, row, chunk);

  float sum[64], total[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = total[i] = 0;
  for (int i = 0; i < kStages - 2; ++i) {
    if (i < tiles) LoadStage<kPacked>(mine + static_cast<uint32_t>(i * 2 * kOperandBytes), x, w, i);
    CommitCopies();
  }
  int stage = 0, free_stage = kStages - 2;
  for (int64_t begin = 0; begin < tiles; begin += per_segment) {
    const int64_t end = min(begin + per_segment, tiles);
    for (int64_t tile = begin; tile < end; ++tile) {
      WaitCopies<kStages - 3>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      const uint32_t at = ring + static_cast<uint32_t>(stage * 2 * kOperandBytes);
      FenceWarpgroup();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step) {
        const uint32_t offset = static_cast<uint32_t>(step * 32);
        MultiplyWarpgroup(sum, Descriptor(at + my_rows + offset), Descriptor(at + kOperandBytes + offset),
                          tile != begin || step != 0 ? 1 : 0);
      }
      CommitWarpgroup();
      // Every warpgroup has passed the barrier, so its products of two tiles ago are done.
      const int64_t ahead = tile + kStages - 2;
      if (ahead < tiles) LoadStage<kPacked>(mine + static_cast<uint32_t>(free_stage * 2 * kOperandBytes), x, w, ahead);
      CommitCopies();
      stage = stage + 1 == kStages ? 0 : stage + 1;
      free_stage = free_stage + 1 == kStages ? 0 : free_stage + 1;
      WaitWarpgroup<1>();
    }
    WaitWarpgroup<0>();
    Reread(sum);
#pragma unroll
    for (int i = 0; i < 64; ++i) total[i] = begin == 0 ? sum[i] : total[i] + sum[i];
  }
  StoreTile<Y>(args, total, first_m, first_n);
}

}  // namespace

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

template <class Y, bool kPacked>
void LinearManyRows(const LinearArgs& args, Stream& stream) {
  const int64_t row_tiles = DivideUp(args.m, kBlockRows), output_tiles = DivideUp(args.n, kBlockOutputs);
  Launch(stream, ManyRowsKernel<Y, kPacked>, Grid(row_tiles * output_tiles), kThreads, kSharedBytes, args, row_tiles,
         output_tiles);
}

// --- Instantiations
// ------------------------------------------------------------------------------------------------------

template void LinearManyRows<bf16, true>(const LinearArgs&, Stream&);
template void LinearManyRows<bf16, false>(const LinearArgs&, Stream&);
template void LinearManyRows<float, true>(const LinearArgs&, Stream&);
template void LinearManyRows<float, false>(const LinearArgs&, Stream&);

}  // namespace millrace::cuda
