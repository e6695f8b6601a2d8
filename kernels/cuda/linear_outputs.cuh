// How a tile's sums leave their block: as boxes that the copy engine stores, or, where a cluster's blocks have a part
// of K each, as pieces that they send one another and add in the order of K. S is the Shape of linear_many_rows.cu.
#pragma once

#include <algorithm>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/linear.cuh"

namespace millrace::cuda {

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupStaging = 8192;  // outputs on their way out: boxes of 128 bytes by rows of x

// --- Instructions
// ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t AddressIn(uint32_t block, uint32_t address) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}
// To another block of the cluster; the bytes count at its barrier.
__device__ __forceinline__ void Send(uint32_t remote, uint32_t remote_barrier, const float* four) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(remote),
      "r"(remote_barrier), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
      : "memory");
}
// Four 8 x 8 matrices of bf16, each transposed on its way: lane 8 i + r names the place of row r of matrix i.
__device__ __forceinline__ void StoreTransposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
// The map's box from shared memory; what lies beyond the matrix is left out.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, int column, int row, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until what this thread stores is read.
__device__ __forceinline__ void AwaitStores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Makes this thread's writes to shared memory known to the copy engine.
__device__ __forceinline__ void FenceStores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- Boxes
// ----------------------------------------------------------------------------------------------------------------

// What to add to an output. Nothing is minus zero, which leaves every number as it is.
__device__ __forceinline__ float BiasAt(const LinearArgs& args, int64_t n) {
  return args.bias != nullptr && n < args.n ? args.bias[n] : -0.0f;
}

// Rows of x that are staged at once.
template <class S, class Y>
constexpr int kRowsInBox = std::min(S::kTokens, kWarpgroupStaging / 64 / static_cast<int>(sizeof(Y)));

// The places of 16 bytes in a row of 64 are permuted as in Swizzled, two rows alike.
__device__ __forceinline__ uint32_t SwizzledHalf(uint32_t base, int r, int c) {
  return base + static_cast<uint32_t>(r * 64 + ((c ^ (r >> 1 & 3)) << 4));
}

// Of bf16 sums, as SiluMul has them.
__device__ __forceinline__ float Gated(float gate, float up) {
  return SiluMul(ToFloat(Round(gate)), ToFloat(Round(up)));
}

// One tile's way out: a warpgroup lays some rows of x at a time out in its staging, as boxes in the 128-byte swizzle,
// and one thread has them stored. The chunks may be stored while the next tile is multiplied.
template <class S, class Y>
struct TileStore {
  static constexpr int kBox = S::kGated ? S::kGroupOwn : kTileBytes / static_cast<int>(sizeof(Y));  // outputs
  static constexpr int kRows = kRowsInBox<S, Y>, kChunks = S::kTokens / kRows;
  static_assert(S::kTokens % kRows == 0);

  const LinearArgs& args;
  const CUtensorMap* map;
  bool in_boxes;
  uint32_t staging;
  int group, first_token = 0, first_output = 0;

  __device__ __forceinline__ TileStore(const LinearArgs& arguments, const CUtensorMap* y_map, bool boxes, uint32_t at,
                                       int warpgroup)
      : args(arguments), map(y_map), in_boxes(boxes), staging(at), group(warpgroup) {}

  __device__ __forceinline__ void Begin(int token, int output) {
    first_token = token;
    first_output = output;
  }

  __device__ __forceinline__ void Chunk(const float (&total)[S::kTokens / 2], int chunk) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
    const int token = first_token + chunk * kRows;
    if (token >= args.m) return;
    const float bias[2] = {BiasAt(args, first_output + warp * 16 + lane / 4),
                           BiasAt(args, first_output + warp * 16 + lane / 4 + 8)};
    if (thread == 0) AwaitStores();
    SyncWarpgroup(1 + group);
#pragma unroll
    for (int j = 0; j < kRows / 8; j += S::kGated ? 4 : sizeof(Y) == 2 ? 2 : 1) {
      const float* const c = total + (chunk * kRows / 8 + j) * 4;
      if constexpr (S::kGated) {
        const auto pair = [c](int i) {
          return PackPair(Gated(c[4 * i], c[4 * i + 2]), Gated(c[4 * i + 1], c[4 * i + 3]));
        };
        StoreTransposed(SwizzledHalf(staging, j * 8 + lane, warp), pair(0), pair(1), pair(2), pair(3));
      } else if constexpr (sizeof(Y) == 2) {
        const uint32_t at = Swizzled(staging, lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
        StoreTransposed(at + static_cast<uint32_t>(j * 8 * kTileBytes), PackPair(c[0] + bias[0], c[1] + bias[0]),
                        PackPair(c[2] + bias[1], c[3] + bias[1]), PackPair(c[4] + bias[0], c[5] + bias[0]),
                        PackPair(c[6] + bias[1], c[7] + bias[1]));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int output = warp * 16 + lane / 4 + i / 2 * 8, row = lane % 4 * 2 + i % 2;
          const uint32_t at =
              Swizzled(staging + static_cast<uint32_t>(output / kBox * kRows * kTileBytes), row, output % kBox / 4) +
              static_cast<uint32_t>(output % 4 * 4 + j * 8 * kTileBytes);
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(c[i] + bias[i / 2]) : "memory");
        }
      }
    }
    FenceStores();
    SyncWarpgroup(1 + group);
    if (S::kGated || in_boxes) {
      if (thread == 0) {
#pragma unroll
        for (int box = 0; box < S::kGroupOwn / kBox; ++box) {
          StoreBox(map, first_output + box * kBox, token, staging + static_cast<uint32_t>(box * kRows * kTileBytes));
        }
        CommitStores();
      }
    } else {
#pragma unroll 1
      for (int i = thread; i < kRows * 64; i += kWarpgroup) {
        const int row = i / 64, output = i % 64;
        const uint32_t at = Swizzled(staging + static_cast<uint32_t>(output / kBox * kRows * kTileBytes), row,
                                     output % kBox * static_cast<int>(sizeof(Y)) / 16) +
                            static_cast<uint32_t>(output * static_cast<int>(sizeof(Y)) % 16);
        if (token + row >= args.m || first_output + output >= args.n) continue;
        static_cast<Y*>(args.y)[(token + row) * args.n + first_output + output] =
            *static_cast<const Y*>(__cvta_shared_to_generic(at));
      }
    }
  }
};

// --- Pieces
// ---------------------------------------------------------------------------------------------------------------

// Where 16 bytes of a piece lie in a warpgroup's 128: what a wgmma thread holds of eight rows. Permuted so that
// neighbouring outputs of one row, each with another thread, lie in different banks.
__device__ __forceinline__ int PlaceInPiece(int warp, int eighth, int pair) {
  return warp * kWarp + ((eighth * 4 + pair) ^ (warp * 2 + eighth / 4));
}

// Sends the tile's sums to the blocks of the split that add them: eight rows of x in turn to each.
template <class S>
__device__ __forceinline__ void SendPiece(const float (&sum)[S::kTokens / 2], uint32_t piece, uint32_t exchange,
                                          uint32_t first_block, uint32_t summed) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarp;
  const int place =
      static_cast<int>(threadIdx.x) / kWarpgroup * kWarpgroup + PlaceInPiece(thread / kWarp, lane / 4, lane % 4);
#pragma unroll
  for (int block = 0; block < S::kSplit; ++block) {
    const uint32_t to = AddressIn(first_block + static_cast<uint32_t>(block),
                                  exchange + piece * S::kPieceBytes + static_cast<uint32_t>(place * 16));
    const uint32_t counts = AddressIn(first_block + static_cast<uint32_t>(block), summed);
#pragma unroll
    for (int i = 0; i < S::kMine; ++i) {
      Send(to + static_cast<uint32_t>(i * S::kConsumers * 16), counts, sum + 4 * (i * S::kSplit + block));
    }
  }
}

// Adds the pieces of this block's rows in the order of K. `here` is the exchange.
template <class S, class Y>
__device__ __forceinline__ void AddPieces(const LinearArgs& args, const uint8_t* here, int part, int first_token,
                                          int first_output) {
  const int thread = static_cast<int>(threadIdx.x), row = thread / (S::kOutputs / 4), four = thread % (S::kOutputs / 4);
  const int segments = static_cast<int>(DivideUp(TilesOf(args.k), TilesPerSegment(args.k)));
  const int n = first_output + four * 4;
  const bool in_fours = args.n % 4 == 0 && reinterpret_cast<uintptr_t>(args.y) % (4 * sizeof(Y)) == 0;
  const float bias[4] = {BiasAt(args, n), BiasAt(args, n + 1), BiasAt(args, n + 2), BiasAt(args, n + 3)};
  const uint8_t* from[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int place = four / 16 * kWarpgroup + PlaceInPiece(four / 4 % 4, four % 2 * 4 + e, row / 2);
    from[e] = here + place * 16 + (four / 2 % 2 * 2 + row % 2) * 4;
  }
#pragma unroll
  for (int i = 0; i < S::kMine; ++i) {
    const int token = first_token + (i * S::kSplit + part) * 8 + row;
    if (token >= args.m) break;
    float v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[e] = *reinterpret_cast<const float*>(from[e] + i * S::kConsumers * 16);
#pragma unroll
      for (int p = 1; p < S::kPieces; ++p) {
        const float piece = *reinterpret_cast<const float*>(from[e] + i * S::kConsumers * 16 + p * S::kPieceBytes);
        if (p + kSegments - S::kPieces < segments) v[e] += piece;
      }
      v[e] += bias[e];
    }
    Y* const y = static_cast<Y*>(args.y) + token * args.n + n;
    if (in_fours) {
      if (n < args.n) StoreOutputs(y, make_float4(v[0], v[1], v[2], v[3]));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (n + e < args.n) StoreOutput(y + e, v[e]);
      }
    }
  }
}

}  // namespace millrace::cuda
