// Which block attends to what: computed on the GPU by every block for itself, for the host does not know the contexts.
// The work is laid out as one line, sequence by sequence, kv head by kv head, tile by tile, a tile as long as its
// sequence has blocks of tokens; every block takes an equal stretch of it, cut at chunks. How it is cut changes no
// bits.
#pragma once

#include "kernels/cuda/attention.cuh"

namespace millrace::cuda {

// Chunks first, first + step, … < last of a tile, and where results go that are not the tile's whole.
struct Span {
  Tile tile;
  int first;
  int last;
  int step;
  int chunks;  // of the tile
  int slot;    // of chunk 0

  // Whether chunks are combined as they come.
  __device__ bool Combines() const { return first == 0 && step == 1; }
};

// A sequence's tiles of one kv head; 0 where they are the other kernel's.
__device__ __forceinline__ int TilesOf(const AttentionArgs& args, int s) {
  const int queries = args.Rows(s) * args.group;
  return queries >= args.many_queries ? 0 : (queries + args.tile_queries - 1) / args.tile_queries;
}

class BalancedWalk {
 public:
  static constexpr bool kShared = false;

  // All threads of the block.
  template <int kThreads>
  static __device__ BalancedWalk Plan(const AttentionArgs& args) {
    __shared__ int64_t sums[kThreads / kWarp];
    __shared__ int found_position, found_tiles, found_sequence;
    const int count = args.Sequences(), per_thread = (count + kThreads - 1) / kThreads;
    const int first = static_cast<int>(threadIdx.x) * per_thread, last = min(first + per_thread, count);
    // Length in the high bits, tiles in the low ones: one scan for both.
    const auto work = [&](int s) {
      const int64_t tiles = int64_t{args.kv.num_kv_heads} * TilesOf(args, s);
      return (tiles * Length(args, s)) << 32 | tiles;
    };
    int64_t mine = 0, total = 0;
    for (int s = first; s < last; ++s) mine += work(s);
    int64_t before = BlockScan(mine, sums, total);
    const int length = static_cast<int>(total >> 32), blocks = static_cast<int>(gridDim.x);
    const int share = length / blocks, rest = length - share * blocks, block = static_cast<int>(blockIdx.x);
    BalancedWalk walk;
    walk.begin_ = block * share + min(block, rest);
    walk.end_ = walk.begin_ + share + (block < rest ? 1 : 0);
    walk.previous_ = walk.begin_ - share - (block <= rest ? 1 : 0);
    walk.cuts_ = length / kChunkBlocks + static_cast<int>(total) < args.num_slots;
    for (int s = first; s < last; ++s) {
      const int64_t after = before + work(s);
      if (before >> 32 <= walk.begin_ && walk.begin_ < after >> 32) {
        found_sequence = s;
        found_position = static_cast<int>(before >> 32);
        found_tiles = static_cast<int>(before);
      }
      before = after;
    }
    __syncthreads();
    if (walk.begin_ == walk.end_) return walk;
    walk.sequence_ = found_sequence;
    walk.Enter(args);
    walk.tile_ = (walk.begin_ - found_position) / walk.length_;
    walk.tiles_before_ = found_tiles + walk.tile_;
    walk.position_ = found_position + walk.tile_ * walk.length_;
    return walk;
  }

  __device__ bool Next(const AttentionArgs& args, Span& span) {
    while (position_ < end_) {
      const int head = tile_ / tiles_, first_query = tile_ % tiles_ * args.tile_queries;
      span.tile = Tile(args, sequence_, head, first_query, args.tile_queries);
      span.chunks = span.tile.Chunks();
      span.first = ChunkAt(begin_, span.chunks);
      span.last = ChunkAt(end_, span.chunks);
      span.step = 1;
      span.slot = position_ / kChunkBlocks + tiles_before_;
      position_ += length_;
      ++tiles_before_;
      if (++tile_ == tiles_ * args.kv.num_kv_heads && position_ < end_) {
        do ++sequence_;
        while (TilesOf(args, sequence_) == 0);
        tile_ = 0;
        Enter(args);
      }
      if (span.first < span.last) return true;
    }
    return false;
  }

  // What CombineCutsKernel has to do about the tile in which this block begins: it is told by the first that begins in
  // a tile.
  __device__ Cut Begin(const AttentionArgs& args) const {
    if (begin_ == end_) return Cut{};
    const int chunks =
        Tile(args, sequence_, tile_ / tiles_, tile_ % tiles_ * args.tile_queries, args.tile_queries).Chunks();
    const int prefix = ChunkAt(begin_, chunks);
    if (prefix == 0 || prefix == chunks || (previous_ > position_ && ChunkAt(previous_, chunks) > 0)) return Cut{};
    return {sequence_, tile_ / tiles_, tile_ % tiles_,
            prefix,    chunks,         static_cast<int>(position_ / kChunkBlocks + tiles_before_)};
  }

 private:
  static __device__ int Length(const AttentionArgs& args, int s) {
    return (args.Context(s) + kBlockTokens - 1) / kBlockTokens;
  }
  __device__ void Enter(const AttentionArgs& args) {
    tiles_ = TilesOf(args, sequence_);
    length_ = Length(args, sequence_);
  }
  // The chunk of the current tile that begins nearest to a place on the line.
  __device__ int ChunkAt(int place, int chunks) const {
    if (place <= position_) return 0;
    if (place >= position_ + length_ || !cuts_) return chunks;
    return min((place - position_ + kChunkBlocks / 2) / kChunkBlocks, chunks);
  }

  int begin_ = 0, end_ = 0;  // this block's stretch
  int previous_ = 0;         // where the block before begins
  int position_ = 0;         // where the current tile begins
  int tiles_before_ = 0;
  int sequence_ = 0;
  int tile_ = 0;  // of the sequence, kv head by kv head
  int tiles_ = 1;
  int length_ = 0;
  bool cuts_ = false;  // the workspace holds what cut tiles need
};

// Few tiles: a cluster of blocks shares one tile at a time, chunk by chunk.
class ClusterWalk {
 public:
  static constexpr bool kShared = true;
  static constexpr int kClusterBlocks = 8;

  template <int kThreads>
  static __device__ ClusterWalk Plan(const AttentionArgs& args) {
    ClusterWalk walk;
    walk.wanted_ = static_cast<int>(blockIdx.x) / kClusterBlocks;
    walk.clusters_ = static_cast<int>(gridDim.x) / kClusterBlocks;
    walk.slots_ = args.num_slots / walk.clusters_;
    walk.first_slot_ = walk.wanted_ * walk.slots_;
    return walk;
  }

  // Every block of a cluster gets every span, empty or not.
  __device__ bool Next(const AttentionArgs& args, Span& span) {
    for (; sequence_ < args.Sequences(); ++sequence_) {
      const int tiles = TilesOf(args, sequence_), all = tiles * args.kv.num_kv_heads;
      if (wanted_ < all) {
        span.tile = Tile(args, sequence_, wanted_ / tiles, wanted_ % tiles * args.tile_queries, args.tile_queries);
        span.chunks = span.last = span.tile.Chunks();
        span.first = Rank();
        span.step = kClusterBlocks;
        if (span.chunks <= 1 || span.chunks > slots_) {
          span.first = Rank() == 0 ? 0 : span.chunks;
          span.step = 1;
        }
        span.slot = first_slot_;
        wanted_ += clusters_;
        return true;
      }
      wanted_ -= all;
    }
    return false;
  }
  // Whether the blocks' results of a span are to be combined.
  static __device__ bool Shared(const Span& span) { return span.step > 1; }
  static __device__ int Rank() { return static_cast<int>(blockIdx.x) % kClusterBlocks; }

 private:
  int wanted_ = 0;  // the next tile of this cluster, counted from the first of the current sequence
  int clusters_ = 1;
  int slots_ = 0;  // of this cluster
  int first_slot_ = 0;
  int sequence_ = 0;
};

}  // namespace millrace::cuda
