// The ops of ops.h: preconditions, then the device's own version.
#include <limits>

#include "kernels/check.h"
#include "kernels/cpu/ops.h"
#include "kernels/device_step.h"
#include "kernels/ops.h"
#ifdef MILLRACE_CUDA
#include "kernels/cuda/ops.h"
#endif

// Calls the device's version; `call` starts with the op's name. The CUDA kernels have activations in bf16 alone.
#ifdef MILLRACE_CUDA
#define MILLRACE_ON_DEVICE(stream, call) (stream).device() == Device::kCpu ? cpu::call : cuda::call
#define MILLRACE_ON_DEVICE_OF(A, stream, call)                                           \
  do {                                                                                   \
    if constexpr (std::is_same_v<A, bf16>) {                                             \
      MILLRACE_ON_DEVICE(stream, call);                                                  \
    } else {                                                                             \
      MILLRACE_CHECK((stream).device() == Device::kCpu, "CUDA activations are in bf16"); \
      cpu::call;                                                                         \
    }                                                                                    \
  } while (false)
#else
#define MILLRACE_ON_DEVICE(stream, call) cpu::call
#define MILLRACE_ON_DEVICE_OF(A, stream, call) cpu::call
#endif

namespace millrace {
namespace {

void CheckWorkspace(size_t needed, const Stream& stream) {
  MILLRACE_CHECK(stream.workspace_bytes() >= needed, "the workspace suffices", static_cast<long long>(needed),
                 static_cast<long long>(stream.workspace_bytes()));
}

template <class X, class Y>
void CheckSameShape(const X& x, const Y& y) {
  MILLRACE_CHECK(x.rows == y.rows && x.cols == y.cols, "shapes agree", x.rows, x.cols, y.rows, y.cols);
}

// The host cannot read the ids of a GPU; the kernels that follow them check them there.
void CheckIds(Vec<const int32_t> ids, int64_t least, int64_t end, const Stream& stream) {
  if (stream.device() != Device::kCpu) return;
  for (int64_t i = 0; i < ids.size; ++i) {
    MILLRACE_CHECK(ids[i] >= least && ids[i] < end, "ids are in range", i, ids[i], end);
  }
}

void CheckSampling(Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
                   Mat<const TokenCount> history, const Stream& stream) {
  MILLRACE_CHECK(rows.size == logits.rows && logits.cols > 0, "each logit row has its sampling", rows.size,
                 logits.rows);
  MILLRACE_CHECK(history.rows == 0 || history.cols == logits.cols, "histories span the vocabulary", history.cols);
  CheckWorkspace(SampleWorkspaceBytes(logits.cols, stream), stream);
  if (stream.device() != Device::kCpu) return;
  for (int64_t r = 0; r < rows.size; ++r) {
    const SamplingRow& row = rows[r];
    MILLRACE_CHECK(row.history >= -1 && row.history < history.rows, "the history exists", row.history, history.rows);
    MILLRACE_CHECK(0 <= row.bias_begin && row.bias_begin <= row.bias_end && row.bias_end <= biases.size,
                   "the row's biases lie within the list", row.bias_begin, row.bias_end, biases.size);
  }
  for (int64_t b = 0; b < biases.size; ++b) {
    MILLRACE_CHECK(biases[b].token >= 0 && biases[b].token < logits.cols, "biased tokens are in the vocabulary",
                   biases[b].token, logits.cols);
  }
}

template <class A>
void CheckNormed(const NormedInput<A>& x, PackedWeight w, const Stream& stream) {
  CheckSameShape(x.rows, x.residual);
  CheckSameShape(x.rows, x.sum);
  if (x.delta.rows > 0) CheckSameShape(x.rows, x.delta);
  MILLRACE_CHECK(x.sum.data != x.residual.data || x.rows.rows == 0, "the sum is other memory than the residual");
  MILLRACE_CHECK(x.weight.size == x.rows.cols && w.in == x.rows.cols, "the norm's weight and the matrix span the row",
                 x.weight.size, w.in, x.rows.cols);
  CheckWorkspace(LinearWorkspaceBytes(w.in, stream), stream);
}

template <class A>
void CheckHeads(Mat<const A> qkv, KvLayer<A> kv) {
  MILLRACE_CHECK(kv.head_dim > 0 && kv.head_dim % 16 == 0, "head_dim is a multiple of 16", kv.head_dim);
  const int64_t q_heads = qkv.cols / kv.head_dim - 2 * int64_t{kv.num_kv_heads};
  MILLRACE_CHECK(qkv.cols % kv.head_dim == 0 && kv.num_kv_heads > 0 && q_heads > 0 && q_heads % kv.num_kv_heads == 0,
                 "query heads share kv heads evenly", qkv.cols, kv.num_kv_heads, kv.head_dim);
}

}  // namespace

#ifndef MILLRACE_CUDA
int Stream::CountCuda() { return 0; }

Stream Stream::OpenCuda(int ordinal) {
  MILLRACE_CHECK(false, "this build has CUDA kernels", ordinal);
  std::abort();
}
#endif

size_t PackedWeightBytes(int64_t out, int64_t in, Device device) {
  const int64_t rows = device == Device::kCpu ? (out + kPanelRows - 1) / kPanelRows * kPanelRows : out;
  return static_cast<size_t>(rows * in) * sizeof(bf16);
}

void PackRows(PackedWeight dst, int64_t row_begin, Mat<const bf16> src, Stream& stream) {
  MILLRACE_CHECK(src.cols == dst.in && row_begin >= 0 && row_begin + src.rows <= dst.out,
                 "packed rows lie in the weight", src.cols, dst.in, row_begin, src.rows, dst.out);
  MILLRACE_ON_DEVICE(stream, PackRows(dst, row_begin, src, stream));
}

void Embedding(Mat<float> out, PackedWeight table, Vec<const int32_t> tokens, Stream& stream) {
  MILLRACE_CHECK(out.rows == tokens.size && out.cols == table.in, "shapes agree", out.rows, out.cols, table.in);
  CheckIds(tokens, 0, table.out, stream);
  MILLRACE_ON_DEVICE(stream, Embedding(out, table, tokens, stream));
}

template <class A>
void RmsNorm(Mat<A> out, Mat<const float> x, Vec<const float> weight, float eps, Stream& stream) {
  CheckSameShape(out, x);
  MILLRACE_CHECK(weight.size == x.cols, "the norm's weight spans the row", weight.size, x.cols);
  MILLRACE_ON_DEVICE_OF(A, stream, RmsNorm(out, x, weight, eps, stream));
}

template <class A>
void AddRmsNorm(Mat<A> out, Mat<float> residual, Mat<const float> delta, Vec<const float> weight, float eps,
                Stream& stream) {
  CheckSameShape(out, residual);
  CheckSameShape(out, delta);
  MILLRACE_CHECK(weight.size == out.cols, "the norm's weight spans the row", weight.size, out.cols);
  MILLRACE_ON_DEVICE_OF(A, stream, AddRmsNorm(out, residual, delta, weight, eps, stream));
}

template <class Y, class A>
void Linear(Mat<Y> y, Mat<const A> x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  MILLRACE_CHECK(y.rows == x.rows && y.cols == w.out && x.cols == w.in, "shapes agree", y.rows, y.cols, x.rows, x.cols,
                 w.out, w.in);
  MILLRACE_CHECK(bias.size == 0 || bias.size == w.out, "the bias spans the output", bias.size, w.out);
  CheckWorkspace(LinearWorkspaceBytes(w.in, stream), stream);
  MILLRACE_ON_DEVICE_OF(A, stream, Linear(y, x, w, bias, stream));
}

size_t LinearWorkspaceBytes(int64_t max_in, const Stream& stream) {
  return stream.device() == Device::kCpu ? cpu::LinearWorkspaceBytes(max_in, stream.num_threads()) : 0;
}

template <class A>
void NormLinear(Mat<A> y, const NormedInput<Same<A>>& x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  CheckNormed(x, w, stream);
  MILLRACE_CHECK(y.rows == x.rows.rows && y.cols == w.out, "shapes agree", y.rows, y.cols, x.rows.rows, w.out);
  MILLRACE_CHECK(bias.size == 0 || bias.size == w.out, "the bias spans the output", bias.size, w.out);
  MILLRACE_ON_DEVICE_OF(A, stream, NormLinear(y, x, w, bias, stream));
}

template <class A>
void NormGateUp(Mat<A> out, const NormedInput<Same<A>>& x, PackedWeight gate_up, Mat<Same<A>> products,
                Stream& stream) {
  CheckNormed(x, gate_up, stream);
  MILLRACE_CHECK(out.rows == x.rows.rows && 2 * out.cols == gate_up.out, "shapes agree", out.rows, out.cols,
                 x.rows.rows, gate_up.out);
  MILLRACE_CHECK(products.rows == out.rows && products.cols == gate_up.out, "there is room for the products",
                 products.rows, products.cols, gate_up.out);
  MILLRACE_ON_DEVICE_OF(A, stream, NormGateUp(out, x, gate_up, products, stream));
}

template <class A>
void RopeAppend(Mat<A> qkv, KvLayer<Same<A>> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                RopeTable rope, Vec<const int32_t> positions, Vec<const int32_t> slots, Stream& stream) {
  CheckHeads<A>(qkv, kv);
  MILLRACE_CHECK(positions.size == qkv.rows && slots.size == qkv.rows, "each row has a position and a slot",
                 positions.size, slots.size, qkv.rows);
  MILLRACE_CHECK((q_norm.size == 0 || q_norm.size == kv.head_dim) && (k_norm.size == 0 || k_norm.size == kv.head_dim),
                 "head norms span the head", q_norm.size, k_norm.size);
  CheckSameShape(rope.cos, rope.sin);
  MILLRACE_CHECK(rope.cos.cols == kv.head_dim / 2, "the rotation spans half a head", rope.cos.cols, kv.head_dim);
  CheckIds(positions, 0, rope.cos.rows, stream);
  CheckIds(slots, std::numeric_limits<int32_t>::min(), kv.num_blocks * kBlockTokens, stream);
  MILLRACE_ON_DEVICE_OF(A, stream, RopeAppend(qkv, kv, q_norm, k_norm, eps, rope, positions, slots, stream));
}

template <class A>
void PagedAttention(Mat<A> out, Mat<const Same<A>> qkv, KvLayer<Same<A>> kv, const AttentionBatch& batch, float scale,
                    Stream& stream) {
  CheckHeads<A>(qkv, kv);
  const int64_t sequences = batch.context_len.size;
  MILLRACE_CHECK(scale > 0, "the attention's scale is positive");
  MILLRACE_CHECK(out.rows == qkv.rows && out.cols == qkv.cols - int64_t{2} * kv.num_kv_heads * kv.head_dim,
                 "shapes agree", out.rows, out.cols, qkv.rows, qkv.cols);
  MILLRACE_CHECK(batch.query_start.size == sequences + 1 && batch.block_table.rows == sequences,
                 "one entry per sequence", batch.query_start.size, batch.block_table.rows, sequences);
  for (int64_t s = 0; stream.device() == Device::kCpu && s < sequences; ++s) {
    const int64_t begin = batch.query_start[s], end = batch.query_start[s + 1], context = batch.context_len[s];
    MILLRACE_CHECK(0 <= begin && begin <= end && end <= out.rows && end - begin <= context,
                   "a sequence's rows are its last tokens", s, begin, end, context);
    const int64_t blocks = (context + kBlockTokens - 1) / kBlockTokens;
    MILLRACE_CHECK(blocks <= batch.block_table.cols, "the block table covers the context", s, context,
                   batch.block_table.cols);
    CheckIds({batch.block_table.row(s), blocks}, 0, kv.num_blocks, stream);
  }
  const int heads = static_cast<int>(out.cols / kv.head_dim);
  CheckWorkspace(PagedAttentionWorkspaceBytes(0, heads, kv.num_kv_heads, kv.head_dim, stream), stream);
  MILLRACE_ON_DEVICE_OF(A, stream, PagedAttention(out, qkv, kv, batch, scale, stream));
}

size_t PagedAttentionWorkspaceBytes([[maybe_unused]] int64_t max_context, [[maybe_unused]] int num_heads, int,
                                    int head_dim, const Stream& stream) {
#ifdef MILLRACE_CUDA
  if (stream.device() == Device::kCuda) return cuda::PagedAttentionWorkspaceBytes(max_context, num_heads, head_dim);
#endif
  return cpu::PagedAttentionWorkspaceBytes(head_dim, stream.num_threads());
}

template <class A>
void SiluMul(Mat<A> out, Mat<const Same<A>> gate_up, Stream& stream) {
  MILLRACE_CHECK(out.rows == gate_up.rows && 2 * out.cols == gate_up.cols, "shapes agree", out.rows, out.cols,
                 gate_up.rows, gate_up.cols);
  MILLRACE_ON_DEVICE_OF(A, stream, SiluMul(out, gate_up, stream));
}

template <class A>
void Add(Mat<A> x, Mat<const Same<A>> delta, Stream& stream) {
  CheckSameShape(x, delta);
  MILLRACE_ON_DEVICE_OF(A, stream, Add(x, delta, stream));
}

template <class A>
void GatherRows(Mat<A> out, Mat<const Same<A>> x, Vec<const int32_t> rows, Stream& stream) {
  MILLRACE_CHECK(out.rows == rows.size && out.cols == x.cols, "shapes agree", out.rows, out.cols, rows.size, x.cols);
  CheckIds(rows, 0, x.rows, stream);
  MILLRACE_ON_DEVICE_OF(A, stream, GatherRows(out, x, rows, stream));
}

void ProcessLogits(Mat<float> out, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
                   Mat<const TokenCount> history, Stream& stream) {
  CheckSameShape(out, logits);
  CheckSampling(logits, rows, biases, history, stream);
  MILLRACE_ON_DEVICE(stream, ProcessLogits(out, logits, rows, biases, history, stream));
}

void Sample(Vec<int32_t> tokens, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
            Mat<const TokenCount> history, Stream& stream) {
  MILLRACE_CHECK(tokens.size == logits.rows, "one token per logit row", tokens.size, logits.rows);
  CheckSampling(logits, rows, biases, history, stream);
  MILLRACE_ON_DEVICE(stream, Sample(tokens, logits, rows, biases, history, stream));
}

size_t SampleWorkspaceBytes(int64_t vocab, const Stream& stream) {
#ifdef MILLRACE_CUDA
  if (stream.device() == Device::kCuda) return cuda::SampleWorkspaceBytes(vocab, stream);
#endif
  return cpu::SampleWorkspaceBytes(vocab, stream.num_threads());
}

void CountTokens(Mat<TokenCount> history, Vec<const SamplingRow> rows, Vec<const int32_t> tokens, Stream& stream) {
  MILLRACE_CHECK(rows.size == tokens.size, "each token has its sampling", rows.size, tokens.size);
  for (int64_t r = 0; stream.device() == Device::kCpu && r < rows.size; ++r) {
    if (rows[r].history < 0) continue;
    MILLRACE_CHECK(rows[r].history < history.rows, "the history exists", rows[r].history, history.rows);
    MILLRACE_CHECK(tokens[r] < history.cols, "counted tokens are in the vocabulary", tokens[r], history.cols);
  }
  MILLRACE_ON_DEVICE(stream, CountTokens(history, rows, tokens, stream));
}

void LogProbs(Vec<float> chosen, Mat<float> top_values, Mat<int32_t> top_tokens, Mat<const float> logits,
              Vec<const int32_t> tokens, Stream& stream) {
  MILLRACE_CHECK(chosen.size == logits.rows && tokens.size == logits.rows && top_values.rows == logits.rows,
                 "shapes agree", chosen.size, tokens.size, top_values.rows, logits.rows);
  CheckSameShape(top_values, top_tokens);
  MILLRACE_CHECK(top_values.cols <= logits.cols, "no more top tokens than the vocabulary has", top_values.cols,
                 logits.cols);
  CheckIds(tokens, -1, logits.cols, stream);
  MILLRACE_ON_DEVICE(stream, LogProbs(chosen, top_values, top_tokens, logits, tokens, stream));
}

void LoadStep([[maybe_unused]] const DeviceStep& to, [[maybe_unused]] const StagedSteps& from, Stream& stream) {
  MILLRACE_CHECK(stream.device() == Device::kCuda, "a step is loaded into a GPU");
#ifdef MILLRACE_CUDA
  cuda::LoadStep(to, from, stream);
#endif
}

void StoreTokens([[maybe_unused]] const StagedSteps& to, [[maybe_unused]] const DeviceStep& step, Stream& stream) {
  MILLRACE_CHECK(stream.device() == Device::kCuda, "tokens come back from a GPU");
#ifdef MILLRACE_CUDA
  cuda::StoreTokens(to, step, stream);
#endif
}

template void Linear(Mat<float>, Mat<const float>, PackedWeight, Vec<const float>, Stream&);
template void Linear(Mat<float>, Mat<const bf16>, PackedWeight, Vec<const float>, Stream&);
template void Linear(Mat<bf16>, Mat<const bf16>, PackedWeight, Vec<const float>, Stream&);

#define MILLRACE_FOR(A)                                                                                     \
  template void RmsNorm<A>(Mat<A>, Mat<const float>, Vec<const float>, float, Stream&);                     \
  template void AddRmsNorm<A>(Mat<A>, Mat<float>, Mat<const float>, Vec<const float>, float, Stream&);      \
  template void NormLinear<A>(Mat<A>, const NormedInput<A>&, PackedWeight, Vec<const float>, Stream&);      \
  template void NormGateUp<A>(Mat<A>, const NormedInput<A>&, PackedWeight, Mat<A>, Stream&);                \
  template void RopeAppend<A>(Mat<A>, KvLayer<A>, Vec<const float>, Vec<const float>, float, RopeTable,     \
                              Vec<const int32_t>, Vec<const int32_t>, Stream&);                             \
  template void PagedAttention<A>(Mat<A>, Mat<const A>, KvLayer<A>, const AttentionBatch&, float, Stream&); \
  template void SiluMul<A>(Mat<A>, Mat<const A>, Stream&);                                                  \
  template void Add<A>(Mat<A>, Mat<const A>, Stream&);                                                      \
  template void GatherRows<A>(Mat<A>, Mat<const A>, Vec<const int32_t>, Stream&);
MILLRACE_FOR(float)
MILLRACE_FOR(bf16)
#undef MILLRACE_FOR

}  // namespace millrace
