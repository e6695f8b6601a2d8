// y[m, n] = sum over c of x[m, c] * w[n, c] + bias[n] for more than a few rows, or SiluMul of its halves. Weights are
// wgmma's 64-row side and the rows of x its columns, so that a block reads its weights once for up to 192 rows. One
// thread brings 64-wide tiles of both to a ring in shared memory by bulk copies, weights before the inputs are ready;
// each other warpgroup multiplies 64 outputs. A block walks the four segments of K, adds each to its totals, and stores
// them while it multiplies the first segment of its next tile; or it is one of a cluster of two or four that share the
// segments out and send one another their sums (linear_outputs.cuh). Blocks of neighbouring outputs may bring the rows
// of x together, and those of neighbouring rows the weights. Weights that are gated come eight gates and eight that
// they gate in turn, so that a thread has the sums of both. Bound: bytes up to some 128 rows, 2 per weight; then FLOPs,
// 2 per row, input and output, of which the GPU's power allows some 790 T/s at most (1.4 to 1.6 GHz). H200, 2026-12-01,
// normal numbers, share of a copy's 4205 GB/s at M = 64 / 128: 4096 -> 24576 93 / 88 %, 12288 -> 4096 77 / 56 %, 4096
// -> 4096 63 / 49 %; of 790 TFLOP/s at M = 256 / 512 / 1024 / 2048: 4096 -> 24576 83 / 92 / 86 / 92 %, 4096 -> 6144 71
// / 88 / 89 / 91 %, 12288 -> 4096 60 / 83 / 86 / 86 %, 4096 -> 4096 53 / 74 / 79 / 80 % (512: less busy numbers); 1024
// -> 6144 at M = 1024 / 2048 68 / 77 %, 1024 -> 4096 60 / 70 %, 2048 -> 1024 50 / 70 %, 3072 -> 1024 55 / 75 %. At M =
// 2048 one chain in place of four segments, whose registers then hold 256 rows, takes 3 % less over a layer of 8B.
#include <algorithm>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/linear_maps.cuh"
#include "kernels/cuda/linear_outputs.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

// The copy engine reads the map itself from memory at first use: earlier than the inputs are ready.
__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

constexpr uint32_t kTokenTilesAtOnce = 16;  // that pass over a column of weights together, in the second-level cache

// A block's tile is 64 outputs for each of `groups` warpgroups by `tokens` rows of x. A cluster is `split` parts of K
// (1: a block walks all four segments) by `share` tiles of outputs, which bring x together, by `token_share` tiles of
// x, which bring weights together.
template <int tokens, int groups, int split, int share, int token_share, int per_sm, int kib, bool gated = false>
struct Shape {
  static constexpr int kTokens = tokens, kSplit = split, kShare = share, kTokenShare = token_share, kPerSm = per_sm;
  static constexpr int kOutputs = 64 * groups, kPeers = share * token_share, kCluster = split * kPeers;
  static constexpr int kHere = kSegments / split;  // segments that a block walks
  static constexpr bool kGated = gated;            // eight gates, eight that they gate, and so on: half become outputs
  static constexpr int kOwn = gated ? kOutputs / 2 : kOutputs, kGroupOwn = kOwn / groups;
  static_assert(!gated || split == 1);
  static constexpr int kConsumers = groups * kWarpgroup;
  // Sums and totals need more registers than an equal share: a whole warpgroup brings, and gives its own away.
  static constexpr int kRegisters = split == kSegments || tokens * groups < 256 ? 0 : groups == 2 ? 240 : 160;
  static constexpr bool kReshared = kRegisters > 0;
  static_assert(!kReshared || per_sm == 1);
  static constexpr int kThreads = kConsumers + (kReshared ? kWarpgroup : kWarp);
  static constexpr int kWeightBytes = kOutputs * kTileBytes, kStageBytes = kWeightBytes + tokens * kTileBytes;
  static constexpr int kStagingBytes = split == 1 ? groups * kWarpgroupStaging : 0;
  static constexpr int kOtherBytes = 1024 + kStagingBytes + 34 * 8;  // to align the ring; the barriers
  static constexpr int kMostStages = std::min((kib * 1024 - kOtherBytes) / kStageBytes, 16);
  // What the blocks of a split send one another: two of them the first one's sum of two segments and the other's two
  // sums, four of them a sum each; a block adds its part of the tile's rows.
  static constexpr int kPieces = split == 2 ? 3 : split;
  static constexpr int kMine = tokens / 8 / split;  // eight rows each
  static constexpr int kPieceBytes = kMine * kConsumers * 16, kPartialBytes = split == 1 ? 0 : kPieces * kPieceBytes;
  static constexpr int kFewestStages = (kPartialBytes + kStageBytes - 1) / kStageBytes;
  static_assert(split == 1 || split == 2 || split == kSegments);
  static_assert(kFewestStages <= kMostStages && kMostStages >= 2);
};

struct Plan {
  int stages;
  int exchange;           // where in shared memory the segments' sums meet; 0: in the ring
  bool read_once;         // the weights
  bool in_boxes;          // rows of y start at multiples of 16 bytes
  int x_end, x_rows;      // rows of x in a tile, and how many of them a block brings: fewer where the tile is not full
  uint32_t token_groups;  // of x
  uint32_t units;         // a cluster's tiles: token_groups for each group of outputs
};

// Where tile `index` of a dimension begins. The last one is full, and shares rows with the one before: these get the
// same bits twice, where what lies beyond the matrix takes the copy engine longer than what lies within.
__device__ __forceinline__ int BeginOf(int index, int size, int64_t end) {
  return max(min(index * size, static_cast<int>(end) - size), 0);
}

// The tiles that a cluster owns together.
struct Unit {
  int token_group, output_group;
  __device__ Unit(uint32_t unit, const Plan& plan) {
    if (plan.token_groups == 1) {
      token_group = 0;
      output_group = static_cast<int>(unit);
      return;
    }
    const uint32_t in_group = kTokenTilesAtOnce * (plan.units / plan.token_groups);
    const uint32_t group = unit / in_group, in = unit % in_group;
    const uint32_t width = min(kTokenTilesAtOnce, plan.token_groups - group * kTokenTilesAtOnce);
    token_group = static_cast<int>(group * kTokenTilesAtOnce + in % width);
    output_group = static_cast<int>(in / width);
  }
};

template <class S, class Y>
__global__ void __cluster_dims__(S::kCluster, 1, 1) __launch_bounds__(S::kThreads, S::kPerSm)
    ManyRowsKernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap y_map, LinearArgs args, Plan plan) {
  extern __shared__ uint8_t shared[];
  const uint32_t ring = (SharedAddress(shared) + 1023u) & ~1023u;
  const uint32_t staging = ring + static_cast<uint32_t>(plan.stages * S::kStageBytes);
  const uint32_t exchange = plan.exchange == 0 ? ring : staging;
  const uint32_t full = staging + static_cast<uint32_t>(S::kStagingBytes + plan.exchange);
  const uint32_t empty = full + static_cast<uint32_t>(plan.stages * 8);
  const uint32_t drained = empty + static_cast<uint32_t>(plan.stages * 8), summed = drained + 8;
  const uint32_t rank = S::kCluster == 1 ? 0 : RankInCluster();
  const uint32_t part = rank % S::kSplit, peer = rank / S::kSplit % S::kShare,
                 token_peer = rank / (S::kSplit * S::kShare);
  const auto block_of = [part](uint32_t p, uint32_t t) { return part + (t * S::kShare + p) * S::kSplit; };
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int per_segment = static_cast<int>(TilesPerSegment(args.k)), tiles = static_cast<int>(TilesOf(args.k));
  const int first_tile = static_cast<int>(part) * S::kHere * per_segment;
  const int end_tile = S::kSplit == 1 ? tiles : min(first_tile + S::kHere * per_segment, tiles);
  const uint32_t first_unit = blockIdx.x / S::kCluster, clusters = gridDim.x / S::kCluster;
  const bool brings = warp == S::kConsumers / kWarp && lane == 0;

  const uint64_t w_policy = CachePolicy(plan.read_once), x_policy = CachePolicy(false);
  uint16_t x_sharers = 0, w_sharers = 0;
#pragma unroll
  for (int p = 0; p < S::kShare; ++p) x_sharers |= static_cast<uint16_t>(1u << block_of(p, token_peer));
#pragma unroll
  for (int t = 0; t < S::kTokenShare; ++t) w_sharers |= static_cast<uint16_t>(1u << block_of(peer, t));
  const auto token_of = [&](const Unit& unit) {
    return BeginOf(unit.token_group * S::kTokenShare + static_cast<int>(token_peer), S::kTokens, args.m);
  };
  const auto weight_of = [&](const Unit& unit) {
    return BeginOf(unit.output_group * S::kShare + static_cast<int>(peer), S::kOutputs, args.n);
  };
  const auto stage_bytes = static_cast<uint32_t>(S::kWeightBytes + plan.x_rows * S::kShare * kTileBytes);
  const auto bring_weights = [&](int stage, int tile, const Unit& unit) {
    constexpr int kPart = S::kOutputs / S::kTokenShare;
    const uint32_t barrier = full + static_cast<uint32_t>(stage * 8);
    const uint32_t to = ring + static_cast<uint32_t>(stage * S::kStageBytes);
    const int column = tile * kTileK;
    const int row = weight_of(unit);
    ArriveExpecting(barrier, stage_bytes);
    if constexpr (S::kGated && S::kTokenShare == 1) {
      CopyGroups(to, &w_map, column, row / 16, barrier, w_policy);
    } else if constexpr (S::kGated) {
      CopyGroupsToAll(to + token_peer * kPart * kTileBytes, &w_map, column,
                      (row + static_cast<int>(token_peer) * kPart) / 16, barrier, w_sharers, w_policy);
    } else if constexpr (S::kTokenShare == 1) {
      CopyBox(to, &w_map, column, row, barrier, w_policy);
    } else {
      CopyBoxToAll(to + token_peer * kPart * kTileBytes, &w_map, column, row + static_cast<int>(token_peer) * kPart,
                   barrier, w_sharers, w_policy);
    }
  };
  const auto bring_x = [&](int stage, int tile, const Unit& unit) {
    const uint32_t barrier = full + static_cast<uint32_t>(stage * 8);
    const uint32_t to = ring + static_cast<uint32_t>(stage * S::kStageBytes + S::kWeightBytes);
    const int column = tile * kTileK;
    const int own = min(static_cast<int>(peer) * plan.x_rows, plan.x_end - plan.x_rows);
    if constexpr (S::kShare == 1) {
      CopyBox(to, &x_map, column, token_of(unit), barrier, x_policy);
    } else {
      CopyBoxToAll(to + static_cast<uint32_t>(own * kTileBytes), &x_map, column, token_of(unit) + own, barrier,
                   x_sharers, x_policy);
    }
  };

  int prefetched = 0;
  const auto prefetch = [&] {
    const Unit unit(first_unit, plan);
#pragma unroll 1
    for (; prefetched < plan.stages && first_tile + prefetched < end_tile; ++prefetched) {
      bring_weights(prefetched, first_tile + prefetched, unit);
    }
  };
  if (brings) {
    PrefetchMap(&w_map);
    PrefetchMap(&x_map);
#pragma unroll 1
    for (int i = 0; i < plan.stages; ++i) {
      InitBarrier(full + static_cast<uint32_t>(i * 8), 1);
      InitBarrier(empty + static_cast<uint32_t>(i * 8), (S::kShare + S::kTokenShare - 1) * S::kConsumers / kWarp);
    }
    InitBarrier(drained, S::kSplit * S::kConsumers / kWarp);
    InitBarrier(summed, 1);
    PublishBarriers();
    if constexpr (S::kSplit > 1) ArriveExpecting(summed, S::kPartialBytes);
    if constexpr (S::kTokenShare == 1) prefetch();
  }
  __syncwarp();
  if constexpr (S::kCluster > 1) {
    ArriveClusterRelaxed();
    WaitCluster();
  } else {
    __syncthreads();
  }
  if constexpr (S::kTokenShare > 1) {  // what other blocks receive needs their barriers
    if (brings) prefetch();
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
#pragma unroll 1
      for (int tile = first_tile; tile < end_tile; ++tile, advance()) {
        if (prefetched > 0) {
          --prefetched;
        } else {
          WaitBarrier(empty + static_cast<uint32_t>(stage * 8), phase ^ 1u);
          bring_weights(stage, tile, unit);
        }
        bring_x(stage, tile, unit);
      }
    }
  } else {
    if constexpr (S::kReshared) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
    const int group = warp / 4;
    // Only stages that will be filled again are given back: no one arrives at a block that may have ended.
    int refills =
        static_cast<int>((plan.units - first_unit + clusters - 1) / clusters) * max(end_tile - first_tile, 0) -
        plan.stages;
    const auto release = [&](int s) {
      if (--refills < 0) return;
      const uint32_t barrier = empty + static_cast<uint32_t>(s * 8);
      if constexpr (S::kPeers == 1) {
        if (lane == 0) Arrive(barrier);
      } else {
        if (lane < S::kShare) ArriveAt(barrier, block_of(static_cast<uint32_t>(lane), token_peer));
        const int other = lane - S::kShare;
        if (other >= 0 && other < S::kTokenShare && other != static_cast<int>(token_peer)) {
          ArriveAt(barrier, block_of(peer, static_cast<uint32_t>(other)));
        }
      }
    };
    float sum[S::kTokens / 2], total[S::kHere > 1 ? S::kTokens / 2 : 1];
    TileStore<S, Y> store(args, &y_map, plan.in_boxes, staging + static_cast<uint32_t>(group * kWarpgroupStaging),
                          group);
    int before = 0;  // the stage that the tensor cores are done with next
    const auto multiply = [&](bool begins) {
      WaitBarrier(full + static_cast<uint32_t>(stage * 8), phase);
      const uint32_t a = ring + static_cast<uint32_t>(stage * S::kStageBytes + group * 64 * kTileBytes);
      const uint32_t b = ring + static_cast<uint32_t>(stage * S::kStageBytes + S::kWeightBytes);
      FenceWarpgroup();
#pragma unroll
      for (int step = 0; step < kTileK / 16; ++step) {
        const uint32_t offset = static_cast<uint32_t>(step * 32);
        MultiplyWarpgroup(sum, Descriptor(a + offset), Descriptor(b + offset), !begins || step != 0 ? 1 : 0);
      }
      CommitWarpgroup();
    };
    const auto retire = [&](bool begins) {
      WaitWarpgroup<1>();
      if (!begins) release(before);
      before = stage;
      advance();
    };
    for (uint32_t at = first_unit; at < plan.units; at += clusters) {
      const Unit unit(at, plan);
      const int first_token = token_of(unit), first_output = S::kGated ? weight_of(unit) / 2 : weight_of(unit);
#pragma unroll
      for (int i = 0; i < S::kTokens / 2; ++i) sum[i] = 0;
      for (int begin = first_tile; begin < end_tile; begin += per_segment) {
        const int end = min(begin + per_segment, end_tile);
        int tile = begin;
        if constexpr (S::kSplit == 1) {
          if (begin == first_tile && at != first_unit) {  // the tile before leaves meanwhile
#pragma unroll
            for (int chunk = 0; chunk < store.kChunks; ++chunk) {
              if (tile < end) multiply(tile == begin);
              store.Chunk(total, chunk);
              if (tile < end) retire(tile == begin);
              ++tile;
            }
          }
        }
        for (; tile < end; ++tile) {
          multiply(tile == begin);
          retire(tile == begin);
        }
        WaitWarpgroup<0>();
        Reread(sum);
        release(before);
        if constexpr (S::kHere > 1) {
          // The second part's two sums stay apart: only the first part's may be added before the others are.
#pragma unroll
          for (int i = 0; i < S::kTokens / 2; ++i) {
            if (begin == first_tile) {
              total[i] = sum[i];
            } else if (part == 0) {
              total[i] += sum[i];
            }
          }
        }
      }
      if constexpr (S::kSplit == 1) {
        store.Begin(first_token, first_output + group * S::kGroupOwn);
      } else {
        const uint32_t first_block = rank - part;
        if (plan.exchange == 0) {  // every ring of the split is idle
          if (lane < S::kSplit) ArriveAt(drained, first_block + static_cast<uint32_t>(lane));
          WaitBarrier(drained, 0);
        }
        if constexpr (S::kHere == 1) {
          SendPiece<S>(sum, part, exchange, first_block, summed);
        } else {
          SendPiece<S>(total, part, exchange, first_block, summed);
          if (part > 0) SendPiece<S>(sum, 2, exchange, first_block, summed);
        }
        WaitBarrier(summed, 0);
        AddPieces<S, Y>(args, shared + (exchange - SharedAddress(shared)), static_cast<int>(part), first_token,
                        first_output);
      }
    }
    if constexpr (S::kSplit == 1) {
#pragma unroll
      for (int chunk = 0; chunk < store.kChunks; ++chunk) store.Chunk(total, chunk);
      if (threadIdx.x % kWarpgroup == 0) AwaitStores();  // shared memory is the block's until it is read
    }
  }
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

template <class S>
uint32_t UnitsOf(const LinearArgs& args) {
  return Grid(DivideUp(args.n, S::kOutputs * S::kShare) * DivideUp(args.m, S::kTokens * S::kTokenShare));
}

// Clusters that run at once. How many of more than two blocks find room depends on how the GPU's multiprocessors are
// grouped, which differs from one GPU to another.
template <class S, class Y>
uint32_t ClustersTogether(const Stream& stream) {
  if (S::kCluster <= 2) return static_cast<uint32_t>(StateOf(stream).num_sms * S::kPerSm / S::kCluster);
  static const uint32_t together = [] {
    constexpr int kSharedBytes = S::kMostStages * S::kStageBytes + S::kOtherBytes;
    CheckCuda(cudaFuncSetAttribute(ManyRowsKernel<S, Y>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
              "cudaFuncSetAttribute");
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {S::kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = S::kCluster;
    config.blockDim = S::kThreads;
    config.dynamicSmemBytes = kSharedBytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int clusters = 0;
    CheckCuda(cudaOccupancyMaxActiveClusters(&clusters, ManyRowsKernel<S, Y>, &config),
              "cudaOccupancyMaxActiveClusters");
    return static_cast<uint32_t>(std::max(clusters, 1));
  }();
  return together;
}

template <class S, class Y>
void LaunchShape(const LinearArgs& args, Stream& stream) {
  const int64_t tiles = S::kSplit == 1 ? TilesOf(args.k) : S::kHere * TilesPerSegment(args.k);
  Plan plan{};
  constexpr int kStagesBeside = S::kMostStages - S::kFewestStages;  // the exchange
  if (S::kSplit > 1 && kStagesBeside >= 2 && kStagesBeside >= std::min<int64_t>(tiles, 4)) {
    plan.stages = static_cast<int>(std::clamp<int64_t>(tiles, 1, kStagesBeside));
    plan.exchange = S::kPartialBytes;
  } else {
    plan.stages = static_cast<int>(std::clamp<int64_t>(tiles, S::kFewestStages, S::kMostStages));
  }
  plan.token_groups = Grid(DivideUp(args.m, S::kTokens * S::kTokenShare));
  plan.read_once = plan.token_groups == 1;
  plan.x_end = static_cast<int>(std::min<int64_t>(DivideUp(args.m, 8) * 8, S::kTokens));
  plan.x_rows = static_cast<int>(DivideUp(plan.x_end, S::kShare * 8) * 8);
  plan.units = UnitsOf<S>(args);
  const uint32_t clusters = S::kSplit == 1 ? std::min(plan.units, ClustersTogether<S, Y>(stream)) : plan.units;
  const Y* const y = static_cast<const Y*>(args.y);
  const int64_t y_cols = S::kGated ? args.n / 2 : args.n;
  plan.in_boxes = S::kSplit == 1 && InPacks(y, y_cols);
  constexpr int kWeightBox = S::kOutputs / S::kTokenShare;
  constexpr int kOutBytes = S::kGated ? S::kGroupOwn * static_cast<int>(sizeof(Y)) : kTileBytes;
  PreferSharedMemory(ManyRowsKernel<S, Y>);
  Launch(stream, ManyRowsKernel<S, Y>, Grid(clusters * S::kCluster), S::kThreads,
         static_cast<size_t>(plan.stages * S::kStageBytes + plan.exchange + S::kOtherBytes),
         S::kGated ? MapOfGated(args.w, args.n, args.k, kWeightBox) : MapOf(args.w, args.n, args.k, kWeightBox),
         MapOf(args.x, args.m, args.k, plan.x_rows),
         plan.in_boxes ? MapOf(y, args.m, y_cols, kRowsInBox<S, Y>, kOutBytes) : CUtensorMap{}, args, plan);
}

// All at once: no cluster waits for another to end.
template <class S, class Y>
bool LaunchIfOneRound(const LinearArgs& args, Stream& stream) {
  if (UnitsOf<S>(args) > ClustersTogether<S, Y>(stream)) return false;
  LaunchShape<S, Y>(args, stream);
  return true;
}

// What a block multiplies in turn with tiles of S, in tiles of 64 x 64.
template <class S>
int64_t Work(const LinearArgs& args, int64_t sms) {
  return DivideUp(int64_t{UnitsOf<S>(args)}, sms / S::kCluster) * (S::kOutputs / 64) * (S::kTokens / 64);
}

// As measured. What bounds the narrow products is latency, then what the second-level cache delivers: all of a block's
// part of K in flight at once is worth more than blocks of the next call beside it, one round more than full ones, and
// splits of K, whose sums cost the cluster's slow exchange, only pay where outputs are few. What is gated is not split.
template <class Y, bool gated>
void Choose(const LinearArgs& args, Stream& stream) {
  const bool wide = args.n > 32768, short_k = args.k <= 1024;
  const int64_t sms = StateOf(stream).num_sms;
  if (args.m <= 32) {
    if (args.n > 16384 && !wide && !short_k) {
      return LaunchShape<Shape<64, 3, 1, 2, 1, 1, 226, gated>, Y>(args, stream);
    }
    if constexpr (!gated) {
      if (LaunchIfOneRound<Shape<32, 1, 4, 1, 1, 1, 226>, Y>(args, stream)) return;
      if (args.n <= 4096) return LaunchShape<Shape<32, 1, 4, 1, 1, 3, 74>, Y>(args, stream);
      if (!wide && !short_k) return LaunchShape<Shape<32, 2, 4, 1, 1, 2, 113>, Y>(args, stream);
    }
    if (wide) return LaunchShape<Shape<32, 2, 1, 1, 1, 1, 113, gated>, Y>(args, stream);
    return LaunchShape<Shape<32, 1, 1, 2, 1, 2, 113, gated>, Y>(args, stream);
  }
  if (args.m <= 64) {
    if constexpr (!gated) {
      if (LaunchIfOneRound<Shape<64, 1, 4, 1, 1, 1, 226>, Y>(args, stream)) return;
      if (args.n <= 4096 && !short_k) return LaunchShape<Shape<64, 1, 2, 1, 1, 1, 226>, Y>(args, stream);
    }
    if (LaunchIfOneRound<Shape<64, 1, 1, 4, 1, 1, 226, gated>, Y>(args, stream)) return;
    using Low = Shape<64, 1, 1, 2, 1, 1, 226, gated>;
    using High = Shape<64, 3, 1, 2, 1, 1, 226, gated>;
    if (Work<Low>(args, sms) < Work<High>(args, sms)) return LaunchShape<Low, Y>(args, stream);
    return LaunchShape<High, Y>(args, stream);
  }
  if (args.m <= 128) {
    if constexpr (!gated) {
      if (LaunchIfOneRound<Shape<128, 1, 4, 2, 1, 1, 226>, Y>(args, stream)) return;
    }
    using Low = Shape<128, 1, 1, 2, 1, 1, 226, gated>;
    using High = Shape<128, 3, 1, 2, 1, 1, 226, gated>;
    if (Work<Low>(args, sms) < Work<High>(args, sms)) return LaunchShape<Low, Y>(args, stream);
    return LaunchShape<High, Y>(args, stream);
  }
  if (args.m <= 192) {
    if (short_k && args.n > 2048 && LaunchIfOneRound<Shape<192, 1, 1, 2, 1, 1, 226, gated>, Y>(args, stream)) return;
    if constexpr (!gated) {
      if (LaunchIfOneRound<Shape<64, 1, 2, 1, 1, 1, 226>, Y>(args, stream)) return;
    }
  }
  if constexpr (!gated) {
    if (args.m <= 256 && LaunchIfOneRound<Shape<64, 1, 4, 2, 1, 3, 74>, Y>(args, stream)) return;
  }
  if (LaunchIfOneRound<Shape<128, 1, 1, 2, 1, 1, 226, gated>, Y>(args, stream)) return;
  if (LaunchIfOneRound<Shape<128, 2, 1, 2, 2, 1, 226, gated>, Y>(args, stream)) return;
  using Square = Shape<128, 2, 1, 2, 1, 1, 226, gated>;
  using Wide = Shape<192, 2, 1, 2, 1, 1, 226, gated>;
  using High = Shape<128, 3, 1, 1, 2, 1, 226, gated>;
  const int64_t across = Work<Wide>(args, sms), high = Work<High>(args, sms);
  // Of square tiles the operands are more of what moves.
  if (113 * Work<Square>(args, sms) < 100 * std::min(across, high)) return LaunchShape<Square, Y>(args, stream);
  if (args.m > 256 && across <= high) return LaunchShape<Wide, Y>(args, stream);
  LaunchShape<High, Y>(args, stream);
}

}  // namespace

template <class Y>
void LinearManyRows(const LinearArgs& args, Stream& stream) {
  Choose<Y, false>(args, stream);
}
void LinearGated(const LinearArgs& args, Stream& stream) { Choose<bf16, true>(args, stream); }

// --- Instantiations
// ------------------------------------------------------------------------------------------------------

template void LinearManyRows<bf16>(const LinearArgs&, Stream&);
template void LinearManyRows<float>(const LinearArgs&, Stream&);

}  // namespace millrace::cuda
