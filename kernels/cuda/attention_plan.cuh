// Which block attends to what: computed on the GPU by every block's feeding warp for itself, for the host does not know
// the contexts. The work is one line of chunks: sequence by sequence, kv head by kv head, tile by tile. Most of the
// line is cut into one stretch for each block; the rest into small stretches that blocks take as they finish, since not
// all multiprocessors reach the memory equally fast. How the line is cut changes no bits.
#pragma once

#include "kernels/cuda/attention.cuh"

namespace millrace::cuda {

// Chunks [first, last) of a tile. Where that is not all of them, results go to slots.
struct Span {
  Tile tile;
  int first;
  int last;
  int chunks;   // of the tile; 0: there is no more work
  int prefix;   // chunks that come combined in one slot, that of the last of them
  int slot;     // of chunk 0
  int counter;  // of the tile's chunks that are done

  __device__ bool Whole() const { return first == 0 && last == chunks; }
};

// kAtOnce: sequences of a lane whose loads are under way together.
template <int kAtOnce, class Fn>
__device__ __forceinline__ int ScanSequencesBy(const AttentionArgs& args, int* ends, const Fn& length) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, count = args.Sequences();
  int before = 0;
  for (int begin = 0; begin < count; begin += kAtOnce * kWarp) {
    const int first = begin + lane * kAtOnce;
    int lengths[kAtOnce], sum = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) lengths[i] = first + i < count ? length(first + i) : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += lengths[i];
    int through = sum;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int other = __shfl_up_sync(~0u, through, distance);
      if (lane >= distance) through += other;
    }
    int end = before + through - sum;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      end += lengths[i];
      if (first + i < count) ends[first + i] = end;
    }
    before += __shfl_sync(~0u, through, kWarp - 1);
  }
  __syncwarp();
  return before;
}

// Sets ends[s] to the sum of length(s) over the sequences up to s; returns the sum over all. All lanes of one warp.
template <class Fn>
__device__ __forceinline__ int ScanSequences(const AttentionArgs& args, int* ends, const Fn& length) {
  return args.Sequences() <= kWarp ? ScanSequencesBy<1>(args, ends, length) : ScanSequencesBy<8>(args, ends, length);
}

// The sequence whose part of the line holds a place, and where that part begins.
__device__ __forceinline__ int FindSequence(const AttentionArgs& args, const int* ends, int place, int& start) {
  int low = 0, high = args.Sequences() - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > place) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  start = low > 0 ? ends[low - 1] : 0;
  return low;
}

// The next number of a counter that all blocks share, for all lanes of a warp. Every block takes numbers until one is
// not below `end`; the last to see that leaves zeros in both counters.
__device__ __forceinline__ int TakeNumber(int* counters, int end) {
  int number = 0;
  if (threadIdx.x % kWarp == 0) {
    number = atomicAdd(counters, 1);
    if (number >= end && atomicAdd(counters + 1, 1) == static_cast<int>(gridDim.x) - 1) counters[0] = counters[1] = 0;
  }
  return __shfl_sync(~0u, number, 0);
}

class Plan {
 public:
  // All lanes of the feeding warp; `ends` has room for every sequence.
  __device__ Plan(const AttentionArgs& args, int* ends) : ends_(ends) {
    length_ = ScanSequences(args, ends, [&](int s) { return Length(args, s); });
    cuts_ = length_ <= args.num_slots;
    const int blocks = static_cast<int>(gridDim.x);
    const int each = length_ / blocks;
    unit_ = each < kLeastChunks ? 0 : max(each / kUnits, 1);
    stretch_ = unit_ > 0 ? each - unit_ * kUnitsTaken : (length_ + blocks - 1) / blocks;
    stretches_ = blocks;
    taken_from_ = min(blocks * stretch_, length_);
    Enter(args, static_cast<int>(blockIdx.x));
  }

  // The next span of this block; all lanes. `counters` are zeros between kernels.
  __device__ Span Next(const AttentionArgs& args, int* counters) {
    Span span;
    for (;;) {
      while (position_ < end_) {
        if (tile_ == per_head_ * args.kv.num_kv_heads) {
          do ++sequence_;
          while (ends_[sequence_] == ends_[sequence_ - 1]);
          tile_ = 0;
          EnterSequence(args);
        }
        const int head = per_head_ == 1 ? tile_ : tile_ / per_head_;
        span.tile = Tile(args, sequence_, head, (tile_ - head * per_head_) * args.tile_queries, args.tile_queries);
        span.chunks = span.tile.Chunks();
        const int at = position_;
        const bool begins = begin_ <= at, ends = end_ >= at + of_tile_;
        position_ += of_tile_;
        ++tile_;
        if (cuts_) {
          span.first = begins ? 0 : min(begin_ - at, span.chunks);
          span.last = ends ? span.chunks : min(end_ - at, span.chunks);
          span.slot = at;
          if (!span.Whole()) {
            span.counter = StretchAfter(at);
            span.prefix = min(Boundary(span.counter) - at, span.chunks);
          }
        } else {
          span.first = 0;
          span.last = begins ? span.chunks : 0;
        }
        if (span.first < span.last) return span;
      }
      const int units = unit_ == 0 ? 0 : (length_ - taken_from_ + unit_ - 1) / unit_;
      const int number = unit_ == 0 ? 0 : TakeNumber(counters, units);
      if (number >= units) {
        span.chunks = 0;
        return span;
      }
      Enter(args, stretches_ + number);
    }
  }

  // Counters that a grid of `blocks` needs; those of tiles follow two of the plan's own.
  static constexpr int kCounters = 2;
  static int64_t Counters(int64_t blocks) { return kCounters + blocks * (kUnitsTaken + 3); }

 private:
  static constexpr int kUnits = 16;        // small stretches as long as a block's share …
  static constexpr int kUnitsTaken = 4;    // … of which so many are not its own
  static constexpr int kLeastChunks = 32;  // of a share; smaller ones are the blocks' own

  // A sequence's tiles of one kv head; 0 where they are the other kernel's.
  static __device__ int Tiles(const AttentionArgs& args, int rows) {
    const int queries = rows * args.group;
    if (queries <= args.tile_queries) return queries > 0 ? 1 : 0;
    return queries >= args.many_queries ? 0 : (queries + args.tile_queries - 1) / args.tile_queries;
  }
  static __device__ int ChunksOf(int context) { return (context + kChunkTokens - 1) / kChunkTokens; }
  static __device__ int Length(const AttentionArgs& args, int s) {
    return Tiles(args, args.Rows(s)) * ChunksOf(args.Context(s)) * args.kv.num_kv_heads;
  }

  // Where stretch i begins.
  __device__ int Boundary(int i) const {
    return i < stretches_ ? min(i * stretch_, length_) : min(taken_from_ + (i - stretches_) * unit_, length_);
  }
  // The first stretch that begins after a place.
  __device__ int StretchAfter(int place) const {
    return place < taken_from_ ? place / stretch_ + 1 : stretches_ + (place - taken_from_) / max(unit_, 1) + 1;
  }
  __device__ void Enter(const AttentionArgs& args, int stretch) {
    begin_ = Boundary(stretch);
    end_ = Boundary(stretch + 1);
    position_ = begin_;
    if (begin_ >= end_) return;
    int start;
    sequence_ = FindSequence(args, ends_, begin_, start);
    EnterSequence(args);
    tile_ = (begin_ - start) / of_tile_;
    position_ = start + tile_ * of_tile_;
  }
  __device__ void EnterSequence(const AttentionArgs& args) {
    per_head_ = Tiles(args, args.Rows(sequence_));
    of_tile_ = ChunksOf(args.Context(sequence_));
  }

  int* ends_;        // [S] where each sequence ends on the line
  int length_;       // of the line
  int stretch_;      // the length of each block's own
  int stretches_;    // how many blocks have one
  int unit_;         // the length of those that are taken; 0: there are none
  int taken_from_;   // where they begin
  int begin_, end_;  // the current stretch
  int position_;     // where the current tile begins
  int sequence_ = 0;
  int tile_ = 0;      // of the sequence, kv head by kv head
  int per_head_ = 0;  // tiles of the sequence and one kv head
  int of_tile_ = 0;   // chunks of a tile on the line; its rows may see less
  bool cuts_;         // the slots suffice; else a tile is its first block's
};

}  // namespace millrace::cuda
