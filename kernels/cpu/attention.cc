// Softmax online over the blocks of the context, in order of position. Lanes are tokens for q . k and dims for p . v.
#include "kernels/cpu/builds.h"
#include "kernels/cpu/tile.h"

namespace millrace::cpu::MILLRACE_ISA {
namespace {

static_assert(kBlockTokens == 2 * kLanes);

// The state of up to kTileRows queries.
struct Running {
  float* q;    // [rows, dim]
  float* out;  // [rows, dim], sum of p * v
  float* p;    // [rows, kBlockTokens], scores and then their exponentials
  float max[kTileRows];
  float sum[kTileRows];
  int64_t visible[kTileRows];  // tokens the query sees
};

// Turns row i's scores of one block, `count` of them visible, into p, and rescales what came before.
MILLRACE_LANES void Soften(Running& run, int i, int64_t count, float scale, int64_t dim) {
  float* p = run.p + i * kBlockTokens;
  for (int64_t t = count; t < kBlockTokens; ++t) p[t] = -__builtin_inff();
  const F16 a = Mul(Load(p), Broadcast(scale)), b = Mul(Load(p + kLanes), Broadcast(scale));
  const float block_max = Largest(Max(a, b));
  const float max = run.max[i] > block_max ? run.max[i] : block_max;
  const F16 pa = Exp(Sub(a, Broadcast(max))), pb = Exp(Sub(b, Broadcast(max)));
  Store(p, pa);
  Store(p + kLanes, pb);
  const float block_sum = Sum(Add(pa, pb));
  if (max == run.max[i]) {
    run.sum[i] += block_sum;
    return;
  }
  float lanes[kLanes];
  Store(lanes, Exp(Broadcast(run.max[i] - max)));
  const float kept = lanes[0];
  run.max[i] = max;
  run.sum[i] = __builtin_fmaf(run.sum[i], kept, block_sum);
  float* out = run.out + i * dim;
  for (int64_t d = 0; d < dim; d += kLanes) Store(out + d, Mul(Load(out + d), Broadcast(kept)));
}

// out[i] += sum over tokens in [begin, end) of p[i] * v, for the rows [row, row + rows).
template <class A>
MILLRACE_LANES void Accumulate(Running& run, int row, int rows, const A* v, int64_t dim, int64_t begin, int64_t end) {
  if (begin >= end) return;
  float* const out = run.out + row * dim;
  const Panels<A> dims{v + begin * dim, kLanes, dim};
  MultiplyRows(
      rows, run.p + row * kBlockTokens + begin, kBlockTokens, dims, end - begin, 0,
      dim / kLanes, [=](int m, int64_t d) __attribute__((always_inline)) { return Load(out + m * dim + d * kLanes); },
      [=](int m, int64_t d, F16 sum) __attribute__((always_inline)) { Store(out + m * dim + d * kLanes, sum); });
}

template <class A>
void AttendBlock(Running& run, int rows, const A* k, const A* v, int64_t dim, int64_t first_token, float scale) {
  float* const p = run.p;
  MultiplyRows(
      rows, run.q, dim, Panels<A>{k, kLanes, kBlockTokens}, dim, 0, kBlockTokens / kLanes,
      [](int, int64_t) __attribute__((always_inline)) { return Broadcast(0); },
      [=](int m, int64_t half, F16 sum)
          __attribute__((always_inline)) { Store(p + m * kBlockTokens + half * kLanes, sum); });
  int64_t counts[kTileRows];
  int64_t shared = kBlockTokens;
  for (int i = 0; i < rows; ++i) {
    const int64_t left = run.visible[i] - first_token;
    counts[i] = left < 0 ? 0 : left < kBlockTokens ? left : kBlockTokens;
    if (counts[i] < shared) shared = counts[i];
    if (counts[i] > 0) Soften(run, i, counts[i], scale, dim);
  }
  Accumulate(run, 0, rows, v, dim, 0, shared);
  for (int i = 0; i < rows; ++i) Accumulate(run, i, 1, v, dim, shared, counts[i]);
}

}  // namespace

template <class A>
void AttendTile(const AttentionTile<A>& tile, KvLayer<A> kv) {
  const int64_t dim = kv.head_dim;
  const int rows = static_cast<int>(tile.queries.end - tile.queries.begin);
  Running run;
  run.q = tile.scratch;
  run.out = run.q + kTileRows * dim;
  run.p = run.out + kTileRows * dim;
  int64_t most_visible = 0;
  for (int i = 0; i < rows; ++i) {
    const int64_t query = tile.queries.begin + i, row = query / tile.group, head = query % tile.group;
    const A* q = tile.q + row * tile.q_stride + head * dim;
    for (int64_t d = 0; d < dim; d += kLanes) {
      Store(run.q + i * dim + d, Load(q + d));
      Store(run.out + i * dim + d, Broadcast(0));
    }
    run.max[i] = -__builtin_inff();
    run.sum[i] = 0;
    run.visible[i] = tile.first_visible + row;
    if (run.visible[i] > most_visible) most_visible = run.visible[i];
  }
  for (int64_t token = 0; token < most_visible; token += kBlockTokens) {
    const int64_t block =
        (tile.blocks[token / kBlockTokens] * int64_t{kv.num_kv_heads} + tile.kv_head) * dim * kBlockTokens;
    AttendBlock(run, rows, kv.k + block, kv.v + block, dim, token, tile.scale);
  }
  for (int i = 0; i < rows; ++i) {
    const int64_t query = tile.queries.begin + i, row = query / tile.group, head = query % tile.group;
    A* const out = tile.out + row * tile.out_stride + head * dim;
    const F16 sum = Broadcast(run.sum[i]);
    for (int64_t d = 0; d < dim; d += kLanes) Store(out + d, Div(Load(run.out + i * dim + d), sum));
  }
}

template void AttendTile(const AttentionTile<float>&, KvLayer<float>);
template void AttendTile(const AttentionTile<bf16>&, KvLayer<bf16>);

}  // namespace millrace::cpu::MILLRACE_ISA
