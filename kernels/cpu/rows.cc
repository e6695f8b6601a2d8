// The ops that work on each row alone: norms, rotation, SiLU, addition.
#include "kernels/cpu/builds.h"
#include "kernels/cpu/lanes.h"

namespace millrace::cpu::MILLRACE_ISA {
namespace {

// 1 / sqrt(mean(x^2) + eps): lane j sums the squares of elements j, j + 16, … in order.
template <class A>
MILLRACE_LANES float InverseRms(const A* x, int64_t count, float eps) {
  F16 sum = Broadcast(0);
  ForLanes(count, [&](int64_t i, auto load, auto) {
    const F16 v = load(x + i);
    sum = Fma(v, v, sum);
  });
  return 1.0f / __builtin_sqrtf(Sum(sum) / static_cast<float>(count) + eps);
}

template <class A, class X>
MILLRACE_LANES void Normalise(A* out, const X* x, const float* weight, int64_t count, float eps) {
  const F16 scale = Broadcast(InverseRms(x, count, eps));
  ForLanes(count,
           [&](int64_t i, auto load, auto store) { store(out + i, Mul(Mul(load(x + i), scale), load(weight + i))); });
}

template <class A>
MILLRACE_LANES void Rotate(A* head, const float* cos, const float* sin, int64_t half) {
  ForLanes(half, [&](int64_t i, auto load, auto store) {
    const F16 a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, Sub(Mul(a, c), Mul(b, s)));
    store(head + half + i, Add(Mul(b, c), Mul(a, s)));
  });
}

}  // namespace

template <class A>
void RmsNormRows(Mat<A> out, Mat<const float> x, Vec<const float> weight, float eps, Range rows) {
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    Normalise(out.data + t * x.cols, x.data + t * x.cols, weight.data, x.cols, eps);
  }
}

template <class A>
void AddElements(A* x, const A* delta, int64_t count) {
  ForLanes(count, [&](int64_t i, auto load, auto store) { store(x + i, Add(load(x + i), load(delta + i))); });
}

template <class A>
void AddRmsNormRows(Mat<A> out, Mat<float> residual, Mat<const float> delta, Vec<const float> weight, float eps,
                    Range rows) {
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    float* x = residual.data + t * residual.cols;
    AddElements(x, delta.data + t * delta.cols, residual.cols);
    Normalise(out.data + t * out.cols, x, weight.data, residual.cols, eps);
  }
}

template <class A>
void RopeAppendRows(Mat<A> qkv, KvLayer<A> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                    RopeTable rope, Vec<const int32_t> positions, Vec<const int32_t> slots, Range rows) {
  const int64_t dim = kv.head_dim, kv_heads = kv.num_kv_heads;
  const int64_t q_heads = qkv.cols / dim - 2 * kv_heads;
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    A* const row = qkv.data + t * qkv.cols;
    const float* cos = rope.cos.data + positions.data[t] * (dim / 2);
    const float* sin = rope.sin.data + positions.data[t] * (dim / 2);
    for (int64_t h = 0; h < q_heads + kv_heads; ++h) {
      const float* norm = h < q_heads ? q_norm.data : k_norm.data;
      if (norm != nullptr) Normalise(row + h * dim, row + h * dim, norm, dim, eps);
      Rotate(row + h * dim, cos, sin, dim / 2);
    }
    const int64_t slot = slots.data[t];
    if (slot < 0) continue;
    const int64_t block = slot / kBlockTokens, offset = slot % kBlockTokens;
    for (int64_t h = 0; h < kv_heads; ++h) {
      const A* k = row + (q_heads + h) * dim;
      const A* v = k + kv_heads * dim;
      A* const tile_k = kv.k + (block * kv_heads + h) * dim * kBlockTokens;
      A* const tile_v = kv.v + ((block * kv_heads + h) * kBlockTokens + offset) * dim;
      for (int64_t d = 0; d < dim; ++d) tile_k[d * kBlockTokens + offset] = k[d];
      for (int64_t d = 0; d < dim; ++d) tile_v[d] = v[d];
    }
  }
}

template <class A>
void SiluMulRows(Mat<A> out, Mat<const A> gate_up, Range rows) {
  const F16 one = Broadcast(1), zero = Broadcast(0);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    A* const y = out.data + t * out.cols;
    const A* gate = gate_up.data + t * gate_up.cols;
    const A* up = gate + out.cols;
    ForLanes(out.cols, [&](int64_t i, auto load, auto store) {
      const F16 g = load(gate + i);
      store(y + i, Mul(Div(g, Add(one, Exp(Sub(zero, g)))), load(up + i)));
    });
  }
}

#define MILLRACE_FOR(A)                                                                                  \
  template void RmsNormRows(Mat<A>, Mat<const float>, Vec<const float>, float, Range);                   \
  template void AddRmsNormRows(Mat<A>, Mat<float>, Mat<const float>, Vec<const float>, float, Range);    \
  template void RopeAppendRows(Mat<A>, KvLayer<A>, Vec<const float>, Vec<const float>, float, RopeTable, \
                               Vec<const int32_t>, Vec<const int32_t>, Range);                           \
  template void SiluMulRows(Mat<A>, Mat<const A>, Range);                                                \
  template void AddElements(A*, const A*, int64_t);
MILLRACE_FOR(float)
MILLRACE_FOR(bf16)
#undef MILLRACE_FOR

}  // namespace millrace::cpu::MILLRACE_ISA
