#include "kernels/cpu/ops.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/cpu/state.h"

namespace millrace::cpu {
namespace {

// Elements that pay for waking a thread.
constexpr int64_t kGrainElements = 16 * 1024;

int64_t GrainRows(int64_t cols) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, cols)); }

template <class Fn>
void ForRows(int64_t rows, int64_t cols, Stream& stream, const Fn& fn) {
  StateOf(stream).threads.ParallelFor(rows, GrainRows(cols), [&](int64_t begin, int64_t end, int) {
    fn(Range{begin, end});
  });
}

template <class A>
const ActivationKernels<A>& KernelsOf(Stream& stream) {
  return StateOf(stream).kernels->Of<A>();
}

float* ScratchOf(Stream& stream, int64_t floats, int thread) {
  return reinterpret_cast<float*>(stream.workspace()) + floats * thread;
}

// Fills x.sum and x.rows.
template <class A>
void Normalise(const NormedInput<A>& x, Stream& stream) {
  std::copy_n(x.residual.data, x.sum.rows * x.sum.cols, x.sum.data);
  if (x.delta.rows > 0) {
    cpu::AddRmsNorm(x.rows, x.sum, x.delta, x.weight, x.eps, stream);
  } else {
    cpu::RmsNorm(x.rows, Mat<const float>(x.sum), x.weight, x.eps, stream);
  }
}

int64_t LinearScratchFloats(int64_t in) { return kMaxTileRows * in; }

}  // namespace

void PackRows(PackedWeight dst, int64_t row_begin, Mat<const bf16> src, Stream&) {
  for (int64_t r = 0; r < src.rows; ++r) {
    const int64_t n = row_begin + r;
    bf16* const to = dst.data + n / kPanelRows * dst.in * kPanelRows + n % kPanelRows;
    for (int64_t c = 0; c < dst.in; ++c) to[c * kPanelRows] = src.row(r)[c];
  }
}

void Embedding(Mat<float> out, PackedWeight table, Vec<const int32_t> tokens, Stream& stream) {
  ForRows(out.rows, out.cols * 16, stream, [&](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const int64_t n = tokens[t];
      const bf16* from = table.data + n / kPanelRows * table.in * kPanelRows + n % kPanelRows;
      for (int64_t c = 0; c < out.cols; ++c) out.row(t)[c] = static_cast<float>(from[c * kPanelRows]);
    }
  });
}

template <class A>
void RmsNorm(Mat<A> out, Mat<const float> x, Vec<const float> weight, float eps, Stream& stream) {
  ForRows(x.rows, x.cols, stream, [&](Range rows) { KernelsOf<A>(stream).rms_norm(out, x, weight, eps, rows); });
}

template <class A>
void AddRmsNorm(Mat<A> out, Mat<float> residual, Mat<const float> delta, Vec<const float> weight, float eps,
                Stream& stream) {
  ForRows(out.rows, out.cols, stream,
          [&](Range rows) { KernelsOf<A>(stream).add_rms_norm(out, residual, delta, weight, eps, rows); });
}

template <class Y, class A>
void Linear(Mat<Y> y, Mat<const A> x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  const auto& kernels = KernelsOf<A>(stream);
  const int64_t panels = (w.out + kPanelRows - 1) / kPanelRows;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, x.rows * w.in * kPanelRows));
  StateOf(stream).threads.ParallelFor(panels, grain, [&](int64_t begin, int64_t end, int thread) {
    float* const scratch = ScratchOf(stream, LinearScratchFloats(w.in), thread);
    if constexpr (std::is_same_v<Y, A>) {
      kernels.linear(y, x, w, bias, scratch, {begin, end});
    } else {
      kernels.logits(y, x, w, bias, scratch, {begin, end});
    }
  });
}

template <class A>
void NormLinear(Mat<A> y, const NormedInput<A>& x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  Normalise(x, stream);
  cpu::Linear(y, Mat<const A>(x.rows), w, bias, stream);
}

template <class A>
void NormGateUp(Mat<A> out, const NormedInput<A>& x, PackedWeight gate_up, Mat<A> products, Stream& stream) {
  cpu::NormLinear(products, x, gate_up, {}, stream);
  cpu::SiluMul(out, Mat<const A>(products), stream);
}

template <class A>
void RopeAppend(Mat<A> qkv, KvLayer<A> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps, RopeTable rope,
                Vec<const int32_t> positions, Vec<const int32_t> slots, Stream& stream) {
  ForRows(qkv.rows, qkv.cols, stream, [&](Range rows) {
    KernelsOf<A>(stream).rope_append(qkv, kv, q_norm, k_norm, eps, rope, positions, slots, rows);
  });
}

// Tiles differ in length, so threads claim them one by one; which thread computes one changes nothing in its bits.
template <class A>
void PagedAttention(Mat<A> out, Mat<const A> qkv, KvLayer<A> kv, const AttentionBatch& batch, float scale,
                    Stream& stream) {
  State& state = StateOf(stream);
  const int64_t dim = kv.head_dim, kv_heads = kv.num_kv_heads;
  const int group = static_cast<int>(out.cols / dim / kv_heads);
  const int64_t tile_rows = state.kernels->tile_rows;
  const auto tiles_of = [&](int64_t s) {
    return ((batch.query_start[s + 1] - batch.query_start[s]) * int64_t{group} + tile_rows - 1) / tile_rows;
  };
  std::atomic<int64_t> claimed{0};
  state.threads.ParallelFor(state.num_threads(), 1, [&](int64_t, int64_t, int thread) {
    int64_t first = 0;  // tile of sequence s
    int64_t tile = claimed.fetch_add(1, std::memory_order_relaxed);
    for (int64_t s = 0; s < batch.context_len.size; first += tiles_of(s) * kv_heads, ++s) {
      const int64_t begin = batch.query_start[s], rows = batch.query_start[s + 1] - begin;
      const int64_t tiles = tiles_of(s);
      for (; tile < first + tiles * kv_heads; tile = claimed.fetch_add(1, std::memory_order_relaxed)) {
        const int64_t head = (tile - first) / tiles, query = (tile - first) % tiles * tile_rows;
        AttentionTile<A> work;
        work.q = qkv.row(begin) + head * group * dim;
        work.out = out.row(begin) + head * group * dim;
        work.q_stride = qkv.cols;
        work.out_stride = out.cols;
        work.group = group;
        work.queries = {query, std::min(query + tile_rows, rows * group)};
        work.first_visible = batch.context_len[s] - (rows - 1);
        work.blocks = batch.block_table.row(s);
        work.kv_head = static_cast<int>(head);
        work.scale = scale;
        work.scratch = ScratchOf(stream, AttentionScratchFloats(dim), thread);
        state.kernels->Of<A>().attention(work, kv);
      }
    }
  });
}

template <class A>
void SiluMul(Mat<A> out, Mat<const A> gate_up, Stream& stream) {
  ForRows(out.rows, out.cols * 4, stream, [&](Range rows) { KernelsOf<A>(stream).silu_mul(out, gate_up, rows); });
}

template <class A>
void Add(Mat<A> x, Mat<const A> delta, Stream& stream) {
  ForRows(x.rows, x.cols, stream, [&](Range rows) {
    KernelsOf<A>(stream).add(x.row(rows.begin), delta.row(rows.begin), (rows.end - rows.begin) * x.cols);
  });
}

template <class A>
void GatherRows(Mat<A> out, Mat<const A> x, Vec<const int32_t> rows, Stream&) {
  for (int64_t r = 0; r < out.rows; ++r) {
    std::memcpy(out.row(r), x.row(rows[r]), static_cast<size_t>(x.cols) * sizeof(A));
  }
}

size_t LinearWorkspaceBytes(int64_t max_in, int num_threads) {
  return static_cast<size_t>(LinearScratchFloats(max_in) * num_threads) * sizeof(float);
}

size_t PagedAttentionWorkspaceBytes(int head_dim, int num_threads) {
  return static_cast<size_t>(AttentionScratchFloats(head_dim) * num_threads) * sizeof(float);
}

template void Linear(Mat<float>, Mat<const float>, PackedWeight, Vec<const float>, Stream&);
template void Linear(Mat<float>, Mat<const bf16>, PackedWeight, Vec<const float>, Stream&);
template void Linear(Mat<bf16>, Mat<const bf16>, PackedWeight, Vec<const float>, Stream&);

#define MILLRACE_FOR(A)                                                                                  \
  template void RmsNorm(Mat<A>, Mat<const float>, Vec<const float>, float, Stream&);                     \
  template void AddRmsNorm(Mat<A>, Mat<float>, Mat<const float>, Vec<const float>, float, Stream&);      \
  template void NormLinear(Mat<A>, const NormedInput<A>&, PackedWeight, Vec<const float>, Stream&);      \
  template void NormGateUp(Mat<A>, const NormedInput<A>&, PackedWeight, Mat<A>, Stream&);                \
  template void RopeAppend(Mat<A>, KvLayer<A>, Vec<const float>, Vec<const float>, float, RopeTable,     \
                           Vec<const int32_t>, Vec<const int32_t>, Stream&);                             \
  template void PagedAttention(Mat<A>, Mat<const A>, KvLayer<A>, const AttentionBatch&, float, Stream&); \
  template void SiluMul(Mat<A>, Mat<const A>, Stream&);                                                  \
  template void Add(Mat<A>, Mat<const A>, Stream&);                                                      \
  template void GatherRows(Mat<A>, Mat<const A>, Vec<const int32_t>, Stream&);
MILLRACE_FOR(float)
MILLRACE_FOR(bf16)
#undef MILLRACE_FOR

}  // namespace millrace::cpu
