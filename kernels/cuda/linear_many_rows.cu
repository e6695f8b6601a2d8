// y[m, n] = sum over c of x[m, c] * w[n, c] + bias[n] for more than a few rows. Weights are wgmma's 64-row side and the
// rows of x its columns, so that a block reads its weights once for up to 192 rows. One thread brings 64-wide tiles of
// both to a ring in shared memory by bulk copies, weights before the inputs are ready; each other warpgroup multiplies
// 64 outputs. A block walks the four segments of K, adds each to its totals and goes on to another tile, or it is one
// of a cluster of four that take a segment each and push their sums to one another through distributed shared memory.
// Blocks of neighbouring outputs may bring the rows of x together. Bound: bytes up to some 128 rows, 2 per weight; then
// FLOPs, 2 per row, input and output. H200, 2026-11-30, share of a copy's 4228 GB/s at M = 64 / 128: 4096 -> 24576 84 /
// 76 %, 4096 -> 151936 94 / 80 %, 12288 -> 4096 70 / 53 %, 4096 -> 4096 58 / 36 %; of 790 TFLOP/s at M = 2048 / 8192:
// 4096 -> 24576 78 / 75 %, 4096 -> 6144 82 / 76 %, 1024 -> 6144 59 / 62 %.
#include <algorithm>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/linear.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr uint32_t kTokenTilesAtOnce = 16;  // that pass over a column of weights together, in the second-level cache

// A block's tile is 64 outputs for each of `groups` warpgroups by `tokens` rows of x. A cluster is `split` segments of
// K (1: a block walks all of them) by `share` tiles of outputs that bring x together.
template <int tokens, int groups, int split, int share, int per_sm, int kib>
struct Shape {
  static constexpr int kTokens = tokens, kSplit = split, kShare = share, kPerSm = per_sm;
  static constexpr int kOutputs = 64 * groups, kCluster = split * share;
  static constexpr int kConsumers = groups * kWarpgroup;
  // Sums and totals need more registers than an equal share: a whole warpgroup brings, and gives its own away.
  static constexpr bool kReshared = split == 1 && tokens >= 128;
  static constexpr int kThreads = kConsumers + (kReshared ? kWarpgroup : kWarp);
  static constexpr int kTokensAtOnce = std::min(tokens, 32);  // that a warpgroup stages at once on their way out
  static constexpr int kWeightBytes = kOutputs * kTileBytes, kStageBytes = kWeightBytes + tokens * kTileBytes;
  static constexpr int kPitch = 64 + 4;  // floats: a warp's stores meet 32 banks
  static constexpr int kStagingBytes = split == 1 ? groups * kTokensAtOnce * kPitch * 4 : 0;
  static constexpr int kOtherBytes = 1024 + kStagingBytes + 16 * 16;  // to align the ring; the barriers
  static constexpr int kMostStages = std::min((kib * 1024 - kOtherBytes) / kStageBytes, 16);
  static constexpr int kPartialBytes = split == 1 ? 0 : tokens * kOutputs * 4;  // a quarter of each segment's sums
  static constexpr int kFewestStages = (kPartialBytes + kStageBytes - 1) / kStageBytes;
  static_assert(kFewestStages <= kMostStages);
};

struct Plan {
  int stages;
  bool read_once;        // the weights
  uint32_t token_tiles;  // of x
  uint32_t units;        // a cluster's tiles: token_tiles for each group of outputs
};

// The tiles that a cluster owns together.
struct Unit {
  int first_token, output_group;
  __device__ Unit(uint32_t unit, const Plan& plan) {
    if (plan.token_tiles == 1) {
      first_token = 0;
      output_group = static_cast<int>(unit);
      return;
    }
    const uint32_t in_group = kTokenTilesAtOnce * (plan.units / plan.token_tiles);
    const uint32_t group = unit / in_group, in = unit % in_group;
    const uint32_t width = min(kTokenTilesAtOnce, plan.token_tiles - group * kTokenTilesAtOnce);
    first_token = static_cast<int>(group * kTokenTilesAtOnce + in % width);
    output_group = static_cast<int>(in / width);
  }
};

template <class Y>
__device__ __forceinline__ void StoreFour(const LinearArgs& args, int64_t row, int64_t n, float4 v) {
  if (n >= args.n) return;
  Y* const y = static_cast<Y*>(args.y) + row * args.n + n;
  const float values[4] = {v.x, v.y, v.z, v.w};
  if ((reinterpret_cast<uintptr_t>(args.y) | static_cast<uintptr_t>(args.n) * sizeof(Y)) % (4 * sizeof(Y)) == 0) {
    if (args.bias != nullptr) {
      v.x += args.bias[n], v.y += args.bias[n + 1], v.z += args.bias[n + 2], v.w += args.bias[n + 3];
    }
    StoreOutputs(y, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i < args.n) StoreOutput(y + i, args.bias != nullptr ? values[i] + args.bias[n + i] : values[i]);
  }
}

// One tile's way out, 32 rows of x at a time through this warpgroup's staging, so that the rows of y are written in
// whole lines.
template <class S, class Y>
__device__ __forceinline__ void StoreTile(const LinearArgs& args, const float (&total)[S::kTokens / 2], float* staging,
                                          int group, int64_t first_token, int64_t first_output) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarp;
  const int output = thread / kWarp * 16 + lane / 4, token = lane % 4 * 2;
#pragma unroll
  for (int chunk = 0; chunk < S::kTokens; chunk += S::kTokensAtOnce) {
    if (first_token + chunk >= args.m) break;
    SyncWarpgroup(1 + group);
#pragma unroll
    for (int j = 0; j < S::kTokensAtOnce / 8; ++j) {
      const float* const c = total + (chunk / 8 + j) * 4;
      float* const to = staging + (j * 8 + token) * S::kPitch + output;
      to[0] = c[0];
      to[S::kPitch] = c[1];
      to[8] = c[2];
      to[S::kPitch + 8] = c[3];
    }
    SyncWarpgroup(1 + group);
#pragma unroll
    for (int i = thread; i < S::kTokensAtOnce * 16; i += kWarpgroup) {
      const int64_t row = first_token + chunk + i / 16;
      const float4 v = *reinterpret_cast<const float4*>(staging + i / 16 * S::kPitch + i % 16 * 4);
      if (row < args.m) StoreFour<Y>(args, row, first_output + i % 16 * 4, v);
    }
  }
}

// The sums of the segments, one in each block of the cluster, are added in order: block o adds those of every fourth
// eight rows of x, o first. `here` is in every block where the ring was.
template <class S, class Y>
__device__ __forceinline__ void AddSegments(const LinearArgs& args, const float (&sum)[S::kTokens / 2], uint32_t ring,
                                            const uint8_t* here, uint32_t rank, int64_t first_token,
                                            int64_t first_output) {
  constexpr int kMine = S::kTokens / 8 / S::kSplit;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int segment = static_cast<int>(rank % S::kSplit), first = static_cast<int>(rank) - segment;
  const auto place = [thread](int s, int i) { return ((s * kMine + i) * S::kConsumers + thread) * 16; };
  ArriveClusterRelaxed();
  WaitCluster();  // no one still multiplies from a ring
#pragma unroll
  for (int j = 0; j < S::kTokens / 8; ++j) {
    StoreAt(static_cast<uint32_t>(first + j % S::kSplit), ring + static_cast<uint32_t>(place(segment, j / S::kSplit)),
            sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
  }
  ArriveCluster();
  WaitCluster();
  const int segments = static_cast<int>(DivideUp(TilesOf(args.k), TilesPerSegment(args.k)));
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    float4 v = *reinterpret_cast<const float4*>(here + place(0, i));
#pragma unroll
    for (int s = 1; s < S::kSplit; ++s) {
      const float4 part = *reinterpret_cast<const float4*>(here + place(s, i));
      if (s < segments) v.x += part.x, v.y += part.y, v.z += part.z, v.w += part.w;
    }
    const int64_t row = first_token + (i * S::kSplit + segment) * 8 + lane % 4 * 2;
    const int64_t n = first_output + thread / kWarp * 16 + lane / 4;
    const float values[2][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (row + t >= args.m || n + 8 * half >= args.n) continue;
        const float value = values[half][t];
        StoreOutput(static_cast<Y*>(args.y) + (row + t) * args.n + n + 8 * half,
                    args.bias != nullptr ? value + args.bias[n + 8 * half] : value);
      }
    }
  }
}

template <class S, class Y>
__global__ void __cluster_dims__(S::kCluster, 1, 1) __launch_bounds__(S::kThreads, S::kPerSm)
    ManyRowsKernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                   LinearArgs args, Plan plan) {
  extern __shared__ uint8_t shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023u) & ~1023u;
  const uint32_t after_ring = static_cast<uint32_t>(plan.stages * S::kStageBytes);
  const uint32_t full = ring + after_ring + S::kStagingBytes, empty = full + static_cast<uint32_t>(plan.stages * 8);
  const uint32_t rank = S::kCluster == 1 ? 0 : RankInCluster();
  const uint32_t segment = rank % S::kSplit, peer = rank / S::kSplit;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t per_segment = TilesPerSegment(args.k);
  const int64_t first_tile = segment * per_segment;
  const int64_t end_tile = S::kSplit == 1 ? TilesOf(args.k) : min(first_tile + per_segment, TilesOf(args.k));
  const uint32_t first_unit = blockIdx.x / S::kCluster, clusters = gridDim.x / S::kCluster;
  const bool brings = warp == S::kConsumers / kWarp && lane == 0;

  const uint64_t w_policy = CachePolicy(plan.read_once), x_policy = CachePolicy(false);
  uint16_t sharers = 0;
#pragma unroll
  for (int p = 0; p < S::kShare; ++p) sharers |= static_cast<uint16_t>(1u << (segment + p * S::kSplit));
  const auto bring_weights = [&](int stage, int64_t tile, const Unit& unit) {
    const uint32_t barrier = full + static_cast<uint32_t>(stage * 8);
    ArriveExpecting(barrier, S::kStageBytes);
    CopyBox(ring + static_cast<uint32_t>(stage * S::kStageBytes), &w_map, static_cast<int>(tile) * kTileK,
            (unit.output_group * S::kShare + static_cast<int>(peer)) * S::kOutputs, barrier, w_policy);
  };
  const auto bring_x = [&](int stage, int64_t tile, const Unit& unit) {
    constexpr int kPart = S::kTokens / S::kShare;
    const uint32_t barrier = full + static_cast<uint32_t>(stage * 8);
    const uint32_t to = ring + static_cast<uint32_t>(stage * S::kStageBytes + S::kWeightBytes);
    const int column = static_cast<int>(tile) * kTileK, row = unit.first_token * S::kTokens;
    if constexpr (S::kShare == 1) {
      CopyBox(to, &x_map, column, row, barrier, x_policy);
    } else {
      CopyBoxToAll(to + peer * kPart * kTileBytes, &x_map, column, row + static_cast<int>(peer) * kPart, barrier,
                   sharers, x_policy);
    }
  };

  int prefetched = 0;
  if (brings) {
    for (int i = 0; i < plan.stages; ++i) {
      InitBarrier(full + static_cast<uint32_t>(i * 8), 1);
      InitBarrier(empty + static_cast<uint32_t>(i * 8), S::kShare * S::kConsumers / kWarp);
    }
    PublishBarriers();
    const Unit unit(first_unit, plan);
    for (; prefetched < plan.stages && first_tile + prefetched < end_tile; ++prefetched) {
      bring_weights(prefetched, first_tile + prefetched, unit);
    }
  }
  __syncwarp();
  if constexpr (S::kCluster > 1) {
    ArriveClusterRelaxed();
    WaitCluster();
  } else {
    __syncthreads();
  }
  AwaitInputs();

  int stage = 0;
  uint32_t phase = 0;
  const auto advance = [&] {
    if (++stage == plan.stages) {
      stage = 0;
      phase ^= 1u;
    }
  };
  if (warp >= S::kConsumers / kWarp) {
    if constexpr (S::kReshared) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    for (uint32_t at = first_unit; brings && at < plan.units; at += clusters) {
      const Unit unit(at, plan);
      for (int64_t tile = first_tile; tile < end_tile; ++tile, advance()) {
        if (prefetched > 0) {
          --prefetched;
        } else {
          WaitBarrier(empty + static_cast<uint32_t>(stage * 8), phase ^ 1u);
          bring_weights(stage, tile, unit);
        }
        bring_x(stage, tile, unit);
      }
    }
    if constexpr (S::kSplit > 1) {  // with AddSegments
      __syncwarp();
      ArriveClusterRelaxed();
      WaitCluster();
      ArriveClusterRelaxed();
      WaitCluster();
    }
  } else {
    if constexpr (S::kReshared) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int group = warp / 4;
    const auto release = [&](int s) {
      const uint32_t barrier = empty + static_cast<uint32_t>(s * 8);
      if constexpr (S::kShare == 1) {
        if (lane == 0) Arrive(barrier);
      } else {
        if (lane < S::kShare) ArriveAt(barrier, segment + static_cast<uint32_t>(lane * S::kSplit));
      }
    };
    float sum[S::kTokens / 2];
    for (uint32_t at = first_unit; at < plan.units; at += clusters) {
      const Unit unit(at, plan);
      const int64_t first_token = int64_t{unit.first_token} * S::kTokens;
      const int64_t first_output = (int64_t{unit.output_group} * S::kShare + peer) * S::kOutputs;
      float total[S::kSplit == 1 ? S::kTokens / 2 : 1];
#pragma unroll
      for (int i = 0; i < S::kTokens / 2; ++i) sum[i] = 0;
      for (int64_t begin = first_tile; begin < end_tile; begin += per_segment) {
        const int64_t end = min(begin + per_segment, end_tile);
        int before = 0;
        for (int64_t tile = begin; tile < end; ++tile) {
          WaitBarrier(full + static_cast<uint32_t>(stage * 8), phase);
          const uint32_t a = ring + static_cast<uint32_t>(stage * S::kStageBytes + group * 64 * kTileBytes);
          const uint32_t b = ring + static_cast<uint32_t>(stage * S::kStageBytes + S::kWeightBytes);
          FenceWarpgroup();
#pragma unroll
          for (int step = 0; step < kTileK / 16; ++step) {
            const uint32_t offset = static_cast<uint32_t>(step * 32);
            MultiplyWarpgroup(sum, Descriptor(a + offset), Descriptor(b + offset), tile != begin || step != 0 ? 1 : 0);
          }
          CommitWarpgroup();
          WaitWarpgroup<1>();
          if (tile != begin) release(before);
          before = stage;
          advance();
        }
        WaitWarpgroup<0>();
        Reread(sum);
        release(before);
        if constexpr (S::kSplit == 1) {
#pragma unroll
          for (int i = 0; i < S::kTokens / 2; ++i) total[i] = begin == 0 ? sum[i] : total[i] + sum[i];
        }
      }
      if constexpr (S::kSplit == 1) {
        float* const staging = reinterpret_cast<float*>(shared + (ring - SharedAddress(shared)) + after_ring) +
                               group * S::kTokensAtOnce * S::kPitch;
        StoreTile<S, Y>(args, total, staging, group, first_token, first_output + group * 64);
      } else {
        AddSegments<S, Y>(args, sum, ring, shared + (ring - SharedAddress(shared)), rank, first_token, first_output);
      }
    }
  }
  if constexpr (S::kSplit == 1 && S::kShare > 1) {  // a block's shared memory outlives those who write and arrive there
    __syncwarp();
    ArriveClusterRelaxed();
    WaitCluster();
  }
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

// The copy engine's view of a matrix whose rows start at multiples of 16 bytes: boxes of 64 columns by `box_rows`.
CUtensorMap MapOf(const bf16* matrix, int64_t rows, int64_t cols, int box_rows) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    CheckCuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
              "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(cols) * sizeof(bf16)};
  const cuuint32_t box[2] = {kTileK, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bf16*>(matrix), sizes, pitch,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CheckCuda(result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
  return map;
}

template <class S, class Y>
void LaunchShape(const LinearArgs& args, Stream& stream) {
  const int64_t tiles = S::kSplit == 1 ? TilesOf(args.k) : TilesPerSegment(args.k);
  Plan plan{};
  plan.stages = static_cast<int>(std::clamp<int64_t>(tiles, S::kFewestStages, S::kMostStages));
  plan.token_tiles = Grid(DivideUp(args.m, S::kTokens));
  plan.read_once = plan.token_tiles == 1;
  plan.units = Grid(DivideUp(args.n, S::kOutputs * S::kShare)) * plan.token_tiles;
  const uint32_t together = static_cast<uint32_t>(StateOf(stream).num_sms * S::kPerSm / S::kCluster);
  const uint32_t clusters = S::kSplit == 1 ? std::min(plan.units, together) : plan.units;
  PreferSharedMemory(ManyRowsKernel<S, Y>);
  Launch(stream, ManyRowsKernel<S, Y>, Grid(clusters * S::kCluster), S::kThreads,
         static_cast<size_t>(plan.stages * S::kStageBytes + S::kOtherBytes), MapOf(args.w, args.n, args.k, S::kOutputs),
         MapOf(args.x, args.m, args.k, S::kTokens / S::kShare), args, plan);
}

// Rounds of a GPU full of pairs of blocks, in rows of x: what a call with many rows costs.
int64_t Rounds(const LinearArgs& args, int tokens, int64_t sms) {
  return DivideUp(DivideUp(args.n, 256) * DivideUp(args.m, tokens), sms / 2) * tokens;
}

}  // namespace

// As measured: few outputs spread their segments over a cluster and have narrow tiles; where outputs alone fill the
// GPU, a block walks all of K, and its long ring hides the memory's latency.
template <class Y>
void LinearManyRows(const LinearArgs& args, Stream& stream) {
  const bool wide = args.n > 16384, short_k = args.k <= 1024;
  if (args.m <= 32) {
    if (args.n <= 4096) return LaunchShape<Shape<32, 1, 4, 1, 3, 74>, Y>(args, stream);
    if (args.n <= 32768) return LaunchShape<Shape<32, 2, 4, 1, 2, 113>, Y>(args, stream);
    return LaunchShape<Shape<32, 2, 1, 1, 1, 113>, Y>(args, stream);
  }
  if (args.m <= 64) {
    if (args.n < 4096) return LaunchShape<Shape<64, 1, 4, 1, 2, 113>, Y>(args, stream);
    if (args.n == 4096) return LaunchShape<Shape<64, 1, 4, 2, 3, 74>, Y>(args, stream);
    if (!wide && !short_k) return LaunchShape<Shape<64, 2, 4, 2, 2, 113>, Y>(args, stream);
    return LaunchShape<Shape<64, 2, 1, 2, 1, 226>, Y>(args, stream);
  }
  if (args.m <= 128) {
    if (args.n < 4096) return LaunchShape<Shape<128, 1, 4, 2, 2, 113>, Y>(args, stream);
    if (!wide && short_k) return LaunchShape<Shape<64, 2, 1, 2, 1, 226>, Y>(args, stream);
    if (!wide) return LaunchShape<Shape<128, 2, 4, 2, 2, 113>, Y>(args, stream);
  } else if (args.m <= 256) {
    if (args.n < 4096) return LaunchShape<Shape<128, 2, 4, 1, 1, 200>, Y>(args, stream);
  } else {
    const int64_t sms = StateOf(stream).num_sms;  // the wider tile is 3 % better where rounds are equal
    if (97 * Rounds(args, 192, sms) < 100 * Rounds(args, 128, sms)) {
      return LaunchShape<Shape<192, 2, 1, 2, 1, 226>, Y>(args, stream);
    }
  }
  LaunchShape<Shape<128, 2, 1, 2, 1, 226>, Y>(args, stream);
}

// --- Instantiations
// ------------------------------------------------------------------------------------------------------

template void LinearManyRows<bf16>(const LinearArgs&, Stream&);
template void LinearManyRows<float>(const LinearArgs&, Stream&);

}  // namespace millrace::cuda
