// argmax over v of ProcessLogits(row)[v] + Gumbel noise, in two kernels. Search reads the logits once: rows are cut
// into tiles of 4096 tokens, the tiles are spread evenly over the blocks whatever rows they belong to, and a block
// leaves for each row that it touches the largest value and the few tokens that could win. A thread takes 16 tokens of
// a tile; it draws their random words unless none could, with the luckiest word, beat the best score known to the
// block, and one integer comparison for each four of them then tells nearly always that none does. Scores are bounded
// in float, in units of logits, with a margin for every rounding. Choose, a block per row or, where rows are few, a
// cluster, compares what is left in double as the CPU does; rows with filters go through filters.cuh, and what that
// does not decide is worked through as ProcessLogits does. Penalties and bias are written to scratch first. Bound:
// bytes, 4 per logit; with temperature the random words weigh as much. H200, 2026-11-30, V = 151936, share of a copy's
// 4219 GB/s, 256 rows: greedy 90 % (41 us), temperature 57 to 59 % (65 us), top-k 50 38 % (97 us), top-p 0.9 alone 15 %
// (248 us; 391 us where all tokens are alike), penalties 17 % (217 us). One row: 4, 8, 23, 36 (78) and 11 us.
#include "kernels/check.h"
#include "kernels/cuda/filters.cuh"
#include "kernels/cuda/leaders.cuh"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sampling.cuh"
#include "kernels/cuda/vocabulary.cuh"

namespace millrace::cuda {
namespace {

// --- Kernels
// -------------------------------------------------------------------------------------------------------------

constexpr int kBlocksPerSm = 4;
constexpr int kHeld = 256;  // candidates a block holds
constexpr int kKept = 8;    // and those it hands on for a row
constexpr int64_t kBatchRows = 256;
constexpr int kTeam = 8;  // blocks of Choose for a row, where rows are few

// A token whose score is at most `bound`, in units of logits.
struct Candidate {
  int32_t token;
  float value;
  float bound;
};

// What one block found in its part of one row.
struct Part {
  uint64_t best;   // rank of the largest value
  float floor;     // the row's winner has a bound of no less
  int32_t finite;  // whether all logits are
  int32_t count;   // of candidates; more than kKept: too many
  Candidate candidates[kKept];
};

struct SampleArgs {
  const float* logits;
  int64_t vocab;
  bool in_packs;
  int tiles;        // of a row
  int total_tiles;  // of all rows
  int blocks;       // of Search
  const SamplingRow* rows;
  const LogitBias* biases;
  const TokenCount* history;
  float* scratch;  // [rows, vocab]: values after penalties and bias, where there are any
  float* maxima;   // [rows, tiles, threads]: of the sixteen tokens of a thread in a tile, for rows with filters
  Part* parts;     // of block b and row r at b + r
  int32_t* tokens;
};

__device__ __forceinline__ bool IsAdjusted(const SamplingRow& row) {
  return row.history >= 0 || row.bias_begin < row.bias_end;
}
__device__ __forceinline__ bool IsFiltered(const SamplingRow& row, int64_t vocab) {
  return row.temperature != 0 && ((row.top_k > 0 && row.top_k < vocab) || row.top_p < 1 || row.min_p > 0);
}
__device__ __forceinline__ bool IsFinite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

struct SearchScratch {
  uint32_t floor_key;
  int held;
  int kept;
  uint64_t best[kTileThreads / kWarp];
  Candidate candidates[kHeld];
};

// Writes the values of [begin, end) after penalties and bias. Returns whether this thread's logits are finite.
__device__ bool Adjust(float* z, const float* logits, const SamplingRow& row, int64_t begin, int64_t end,
                       const SampleArgs& args) {
  const TokenCount* seen = row.history < 0 ? nullptr : args.history + row.history * args.vocab;
  bool finite = true;
  for (int64_t v = begin + threadIdx.x; v < end; v += kTileThreads) {
    const float x = logits[v];
    finite = finite && IsFinite(x);
    z[v] = seen == nullptr ? x : Penalised(x, seen[v], row);
  }
  __syncthreads();
  for (int64_t b = row.bias_begin + static_cast<int>(threadIdx.x); b < row.bias_end; b += kTileThreads) {
    const LogitBias bias = args.biases[b];
    Require(bias.token >= 0 && bias.token < args.vocab);
    if (bias.token >= begin && bias.token < end) z[bias.token] += bias.value;
  }
  __syncthreads();
  return finite;
}

__device__ __noinline__ void Consider(const float4 values, const uint4 inverted, int64_t v, float temperature,
                                      SearchScratch& shared) {
  const float x[4] = {values.x, values.y, values.z, values.w};
  const uint32_t w[4] = {inverted.x, inverted.y, inverted.z, inverted.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (x[i] == kForbidden) continue;
    const Bounds bounds = BoundsOf(x[i], temperature, w[i]);
    if (bounds.upper < ValueOf(*static_cast<volatile uint32_t*>(&shared.floor_key))) continue;
    atomicMax(&shared.floor_key, KeyOf(bounds.lower));
    const int at = atomicAdd(&shared.held, 1);
    if (at < kHeld) shared.candidates[at] = {static_cast<int32_t>(v + i), x[i], bounds.upper};
  }
}

__device__ __forceinline__ float PowerOfTwo(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Tiles [first, last) of a row.
template <bool kInPacks>
__device__ __forceinline__ void SearchPart(Part& part, const float* logits, float* scratch, float* maxima,
                                           const SamplingRow& row, int64_t first, int64_t last, const SampleArgs& args,
                                           SearchScratch& shared) {
  const int64_t vocab = args.vocab;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {  // the row's parameters are still on their way
    const int64_t v = first * kTile + g * kGroupStride + static_cast<int>(threadIdx.x) * 4;
    if (v < vocab) asm volatile("prefetch.global.L2 [%0];" ::"l"(logits + v));
  }
  if (threadIdx.x == 0) {
    shared.floor_key = KeyOf(-FLT_MAX);
    shared.held = shared.kept = 0;
  }
  __syncthreads();
  const float* x = logits;
  bool finite = true;
  if (IsAdjusted(row)) {
    finite = Adjust(scratch, logits, row, first * kTile, min(int64_t{last} * kTile, vocab), args);
    x = scratch;
  }
  const bool filtered = IsFiltered(row, vocab);
  const float temperature = row.temperature;
  const float per_unit = fminf(1.44269504f / temperature, 1e30f);  // powers of two of a score
  const uint64_t seed = Uniform(row.seed);
  const int64_t position = static_cast<int64_t>(Uniform(static_cast<uint64_t>(row.position)));
  float largest = kForbidden, no_nan = 0;
  uint32_t token = ~0u;
  for (int tile = first; tile < last; ++tile) {
    const int v = tile * kTile + static_cast<int>(threadIdx.x) * 4;
    float values[kGroups][4];
    LoadSlot(values, x, v, static_cast<int>(vocab), kInPacks && (tile + 1) * kTile <= vocab, no_nan);
    float most[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      most[g] = fmaxf(fmaxf(values[g][0], values[g][1]), fmaxf(values[g][2], values[g][3]));
    }
    const float tile_most = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    if (tile_most > largest) {
      largest = tile_most;
#pragma unroll
      for (int i = kGroups * 4 - 1; i >= 0; --i) {
        if (values[i / 4][i % 4] == tile_most) token = static_cast<uint32_t>(v + i / 4 * kGroupStride + i % 4);
      }
    }
    if (temperature == 0) continue;
    if (filtered) maxima[tile * kTileThreads + threadIdx.x] = tile_most;
    float floor = ValueOf(*static_cast<volatile uint32_t*>(&shared.floor_key));
    if (tile != first && (tile_most - floor) * per_unit < -33.1f) continue;  // noise is below 33.01 powers of two
    uint4 words[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      words[g] = Philox(seed, position, static_cast<uint32_t>(v + g * kGroupStride) / 4);
    }
    if (tile == first) {  // a first floor: the best of the threads' largest values
      uint32_t word = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const uint32_t of_group[4] = {words[g].x, words[g].y, words[g].z, words[g].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (token == static_cast<uint32_t>(v + g * kGroupStride + i)) word = of_group[i];
        }
      }
      uint32_t key = largest == kForbidden ? 0 : KeyOf(BoundsOf(largest, temperature, ~word).lower);
      key = __reduce_max_sync(~0u, key);
      if (threadIdx.x % kWarp == 0) atomicMax(&shared.floor_key, key);
      __syncthreads();
      floor = ValueOf(*static_cast<volatile uint32_t*>(&shared.floor_key));
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t limit = __float2uint_rz(PowerOfTwo((most[g] - floor) * per_unit + 32.0f) * 1.001f + 1.0f);
      if (~max(max(words[g].x, words[g].y), max(words[g].z, words[g].w)) > limit) continue;
      Consider(make_float4(values[g][0], values[g][1], values[g][2], values[g][3]),
               make_uint4(~words[g].x, ~words[g].y, ~words[g].z, ~words[g].w), v + g * kGroupStride, temperature,
               shared);
    }
  }
  if (x == logits) finite = no_nan == 0;
  const uint64_t best = WarpReduce(RankOf(largest, token), [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  if (threadIdx.x % kWarp == 0) shared.best[threadIdx.x / kWarp] = best;
  finite = __syncthreads_and(finite) != 0;
  const float floor = ValueOf(shared.floor_key);
  const int held = min(shared.held, kHeld);
  if (static_cast<int>(threadIdx.x) < held && shared.candidates[threadIdx.x].bound >= floor) {
    const int at = atomicAdd(&shared.kept, 1);
    if (at < kKept) part.candidates[at] = shared.candidates[threadIdx.x];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    part.best = shared.best[0];
    for (int w = 1; w < kTileThreads / kWarp; ++w) part.best = max(part.best, shared.best[w]);
    part.floor = floor;
    part.finite = finite;
    part.count = shared.held > kHeld ? kKept + 1 : shared.kept;
  }
  __syncthreads();
}

template <bool kInPacks>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm) SearchKernel(SampleArgs args) {
  AwaitInputs();
  __shared__ SearchScratch shared;
  const int block = static_cast<int>(blockIdx.x), end = (block + 1) * args.total_tiles / args.blocks;
  for (int tile = block * args.total_tiles / args.blocks; tile < end;) {
    const int64_t r = tile / args.tiles;
    const int first = tile % args.tiles, last = min(args.tiles, first + end - tile);
    SearchPart<kInPacks>(args.parts[block + r], args.logits + r * args.vocab, args.scratch + r * args.vocab,
                         args.maxima + r * args.tiles * kTileThreads, args.rows[r], first, last, args, shared);
    tile += last - first;
  }
}

struct Choice {
  uint64_t best;
  bool finite;
  bool decided;
  int32_t token;
};

// The row's parts, by one warp. Undecided where a part has too many candidates.
__device__ Choice MergeParts(int64_t r, const SamplingRow& row, const SampleArgs& args) {
  const auto block_of = [&](int tile) { return ((tile + 1) * args.blocks - 1) / args.total_tiles; };
  const int first = block_of(static_cast<int>(r) * args.tiles),
            last = block_of((static_cast<int>(r) + 1) * args.tiles - 1);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  uint64_t best = 0;
  float floor = -FLT_MAX;
  int bad = 0, crowded = 0;
  for (int b = first + lane; b <= last; b += kWarp) {
    const Part& part = args.parts[b + r];
    best = max(best, part.best);
    floor = fmaxf(floor, part.floor);
    bad |= part.finite == 0;
    crowded |= part.count > kKept;
  }
  best = WarpReduce(best, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  floor = WarpReduce(floor, [](float a, float b) { return fmaxf(a, b); });
  const float max = ValueOf(static_cast<uint32_t>(best >> 32));
  Choice choice{best, __any_sync(~0u, bad) == 0, true, -1};
  if (!choice.finite || max == kForbidden) return choice;
  if (row.temperature == 0) {
    choice.token = static_cast<int32_t>(TokenOf(best));
    return choice;
  }
  if (__any_sync(~0u, crowded) != 0) {
    choice.decided = false;
    return choice;
  }
  double best_score = -INFINITY;
  int32_t token = INT32_MAX;
  unsigned rivals = 0;
  const auto for_rivals = [&](const auto& fn) {
    for (int b = first + lane; b <= last; b += kWarp) {
      const Part& part = args.parts[b + r];
      for (int i = 0; i < part.count; ++i) {
        if (part.candidates[i].bound >= floor) fn(part.candidates[i]);
      }
    }
  };
  for_rivals([&](const Candidate& candidate) {
    ++rivals;
    token = candidate.token;
  });
  if (__reduce_add_sync(~0u, rivals) == 1) {
    choice.token = static_cast<int32_t>(__reduce_min_sync(~0u, static_cast<uint32_t>(token)));
    return choice;
  }
  token = INT32_MAX;
  for_rivals([&](const Candidate& candidate) {
    const double score = (candidate.value - max) / row.temperature + GumbelNoise(WordOf(row, candidate.token));
    if (score > best_score || (score == best_score && candidate.token < token)) {
      best_score = score;
      token = candidate.token;
    }
  });
  const double most = WarpReduce(best_score, [](double a, double b) { return a > b ? a : b; });
  choice.token = static_cast<int32_t>(
      __reduce_min_sync(~0u, best_score == most ? static_cast<uint32_t>(token) : static_cast<uint32_t>(INT32_MAX)));
  return choice;
}

// Clusters of several blocks are for few rows; all but the first block of most end at once.
template <int kTeam>
__global__ void __cluster_dims__(kTeam, 1, 1) __launch_bounds__(kRowThreads) ChooseKernel(SampleArgs args) {
  AwaitInputs();
  __shared__ union {
    FilterScratch filters;
    LeaderScratch leaders;
  } shared;
  __shared__ Choice choice;
  const int64_t r = blockIdx.x / kTeam;
  const SamplingRow row = args.rows[r];
  const bool filtered = IsFiltered(row, args.vocab);
  const Team team{static_cast<int>(blockIdx.x % kTeam), SharesPasses(row, args.vocab) ? kTeam : 1};
  if (team.rank >= team.size) return;
  if (threadIdx.x < kWarp) {
    const Choice merged = MergeParts(r, row, args);
    if (threadIdx.x == 0) {
      choice = merged;
      if (team.rank == 0 && merged.decided && (merged.token < 0 || !filtered)) args.tokens[r] = merged.token;
    }
  }
  __syncthreads();
  if (choice.decided && (choice.token < 0 || !filtered)) return;
  float* const z = args.scratch + r * args.vocab;
  const TiledRow tiled{IsAdjusted(row) ? z : args.logits + r * args.vocab,
                       args.maxima + r * args.tiles * kTileThreads,
                       args.vocab,
                       args.in_packs,
                       ValueOf(static_cast<uint32_t>(choice.best >> 32)),
                       row.temperature,
                       team};
  int32_t token = kUndecided;
  if (filtered) token = ChooseFiltered(tiled, row, choice.decided ? choice.token : -1, shared.leaders);
  if (team.rank > 0) return;
  if (token == kUndecided) {
    __syncthreads();
    FilterRow(z, tiled.x, tiled.max, args.vocab, row, shared.filters);
    token = NoisyArgmax(z, args.vocab, row, shared.filters);
  }
  if (threadIdx.x == 0) args.tokens[r] = token;
}

// Rows may share a history.
__global__ void CountTokensKernel(Mat<TokenCount> history, Vec<const SamplingRow> rows, const int32_t* tokens) {
  AwaitInputs();
  const int64_t r = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (r >= rows.size) return;
  const int64_t h = rows.data[r].history, token = tokens[r];
  if (h < 0 || token < 0) return;
  Require(h < history.rows && token < history.cols);
  atomicAdd(history.data + h * history.cols + token, 1u);
}

// --- Launchers
// -----------------------------------------------------------------------------------------------------------

// Of a row's scratch and its slots' maxima.
int64_t FloatsOf(int64_t vocab) { return vocab + DivideUp(vocab, kTile) * kTileThreads; }

int MaxBlocks(const Stream& stream) { return StateOf(stream).num_sms * kBlocksPerSm; }

void SampleBatch(Vec<int32_t> tokens, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
                 Mat<const TokenCount> history, Stream& stream) {
  const int tiles = static_cast<int>(DivideUp(logits.cols, kTile)), total = static_cast<int>(logits.rows) * tiles;
  std::byte* const workspace = stream.workspace();
  const SampleArgs args{logits.data,
                        logits.cols,
                        InPacks(logits.data, logits.cols),
                        tiles,
                        total,
                        std::min(total, MaxBlocks(stream)),
                        rows.data,
                        biases.data,
                        history.data,
                        reinterpret_cast<float*>(workspace),
                        reinterpret_cast<float*>(workspace) + kBatchRows * logits.cols,
                        reinterpret_cast<Part*>(workspace + kBatchRows * FloatsOf(logits.cols) * sizeof(float)),
                        tokens.data};
  Launch(stream, args.in_packs ? SearchKernel<true> : SearchKernel<false>, Grid(args.blocks), kTileThreads, 0, args);
  const int team = logits.rows * kTeam <= StateOf(stream).num_sms ? kTeam : 1;
  Launch(stream, team > 1 ? ChooseKernel<kTeam> : ChooseKernel<1>, Grid(logits.rows * team), kRowThreads, 0, args);
}

}  // namespace

size_t SampleWorkspaceBytes(int64_t vocab, const Stream& stream) {
  return static_cast<size_t>(kBatchRows * FloatsOf(vocab)) * sizeof(float) +
         static_cast<size_t>(MaxBlocks(stream) + kBatchRows) * sizeof(Part);
}

void Sample(Vec<int32_t> tokens, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
            Mat<const TokenCount> history, Stream& stream) {
  MILLRACE_CHECK(logits.cols <= kMaxVocab, "sums of a vocabulary's weights fit", logits.cols, kMaxVocab);
  for (int64_t r = 0; r < logits.rows; r += kBatchRows) {
    const int64_t count = std::min(kBatchRows, logits.rows - r);
    SampleBatch(tokens.Slice(r, count), logits.Rows(r, count), rows.Slice(r, count), biases, history, stream);
  }
}

void CountTokens(Mat<TokenCount> history, Vec<const SamplingRow> rows, Vec<const int32_t> tokens, Stream& stream) {
  if (rows.size == 0) return;
  constexpr int kCountThreads = 128;
  Launch(stream, CountTokensKernel, Grid(DivideUp(rows.size, kCountThreads)), kCountThreads, 0, history, rows,
         tokens.data);
}

}  // namespace millrace::cuda
