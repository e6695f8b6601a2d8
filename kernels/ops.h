// The whole host API of the kernels: outputs, inputs, scalars, stream last. Ops never allocate, synchronise or read
// globals; preconditions are checked once, in dispatch.cc. Instantiated for A = float (exact CPU serving) and A = bf16
// (CUDA; on the CPU the specification of it). Sums are in float and in an order that does not depend on how many rows
// share the call.
//
// Letters: T rows (tokens) of the step, C hidden, F ffn, H query heads, K kv heads, D head dim, V vocabulary, R logit
// rows, S sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace millrace {

template <class T>
using Same = std::type_identity_t<T>;  // deduces A from the output alone

// --- Weights
// -------------------------------------------------------------------------------------------------------------

// Bytes of a PackedWeight on the stream's device.
size_t PackedWeightBytes(int64_t out, int64_t in, Device device);

// dst rows [row_begin, row_begin + src.rows) = src, a host matrix [rows, in]. Start-up only.
void PackRows(PackedWeight dst, int64_t row_begin, Mat<const bf16> src, Stream& stream);

// --- Transformer
// ---------------------------------------------------------------------------------------------------------

// out[t] = table[tokens[t]]                                                   out [T, C]  table [V, C]
void Embedding(Mat<float> out, PackedWeight table, Vec<const int32_t> tokens, Stream& stream);

// out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight                           out, x [T, C]  weight [C]
template <class A>
void RmsNorm(Mat<A> out, Mat<const float> x, Vec<const float> weight, float eps, Stream& stream);

// residual += delta; out = RmsNorm(residual)                                  all [T, C]
// The residual and what is added to it are float whatever A is: they are summed up over all layers.
template <class A>
void AddRmsNorm(Mat<A> out, Mat<float> residual, Mat<const float> delta, Vec<const float> weight, float eps,
                Stream& stream);

// y[t, n] = sum over c of x[t, c] * w[n, c] (+ bias[n]; an empty bias is none) y [T, N]  x [T, C]  w [N, C]
// Y is A, or float for logits and for what is added to the residual. The sum runs over c in ascending order with one
// fused multiply-add each.
template <class Y, class A>
void Linear(Mat<Y> y, Mat<const A> x, PackedWeight w, Vec<const float> bias, Stream& stream);
size_t LinearWorkspaceBytes(int64_t max_in, const Stream& stream);

// Rows given as what they are the norm of: sum = residual + delta (an empty delta is zero), x = RmsNorm(sum).
// `sum` is written, and is other memory than the residual, which all of an op may still read. `rows` is room for x: an
// op that needs none leaves it as it is.                                       all [T, C]  weight [C]
template <class A>
struct NormedInput {
  Mat<float> sum;
  Mat<const float> residual;
  Mat<const float> delta;
  Vec<const float> weight;
  float eps;
  Mat<A> rows;
};

// y = Linear(x, w, bias)                                                      y [T, N]  x [T, C]  w [N, C]
template <class A>
void NormLinear(Mat<A> y, const NormedInput<Same<A>>& x, PackedWeight w, Vec<const float> bias, Stream& stream);

// out = SiluMul(Linear(x, gate_up)). `products` is room for what is multiplied, as `rows` is for x.
//                                                                             out [T, F]  x [T, C]  gate_up [2F, C]
//                                                                             products [T, 2F]
template <class A>
void NormGateUp(Mat<A> out, const NormedInput<Same<A>>& x, PackedWeight gate_up, Mat<Same<A>> products, Stream& stream);

// For each row: q and k heads are normalised (RmsNorm over D; empty weights are none) and rotated, (a, b) of the halves
// (i, i + D/2) becoming (a cos - b sin, b cos + a sin) at the row's position; q stays in qkv, k and v go to their slot
// in the cache: block * kBlockTokens + offset. A negative slot writes nothing (padding rows).
//                                                                             qkv [T, (H + 2K) D]  norms [D] positions,
//                                                                             slots [T]
template <class A>
void RopeAppend(Mat<A> qkv, KvLayer<Same<A>> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                RopeTable rope, Vec<const int32_t> positions, Vec<const int32_t> slots, Stream& stream);

// out[t, h] = sum over s of softmax_s(scale * q[t, h] . k[s]) * v[s], s over the tokens that row t sees; kv head h * K
// / H. The context is walked in chunks that depend on absolute position alone.     out [T, H D]  qkv [T, (H + 2K) D]
template <class A>
void PagedAttention(Mat<A> out, Mat<const Same<A>> qkv, KvLayer<Same<A>> kv, const AttentionBatch& batch, float scale,
                    Stream& stream);
size_t PagedAttentionWorkspaceBytes(int64_t max_context, int num_heads, int num_kv_heads, int head_dim,
                                    const Stream& stream);

// out[t, f] = silu(gate_up[t, f]) * gate_up[t, F + f], silu(x) = x / (1 + e^-x) out [T, F]  gate_up [T, 2F]
template <class A>
void SiluMul(Mat<A> out, Mat<const Same<A>> gate_up, Stream& stream);

// x += delta                                                                  both [T, C]
template <class A>
void Add(Mat<A> x, Mat<const Same<A>> delta, Stream& stream);

// out[r] = x[rows[r]]                                                         out [R, C]  x [T, C]
template <class A>
void GatherRows(Mat<A> out, Mat<const Same<A>> x, Vec<const int32_t> rows, Stream& stream);

// --- Sampling
// ------------------------------------------------------------------------------------------------------------

// How to sample one logit row. Fields are validated before they come here.
struct SamplingRow {
  float temperature = 0;  // 0: greedy; the filters below do not apply then
  int32_t top_k = 0;      // 0: off; ties with the k-th stay
  float top_p = 1;        // 1: off
  float min_p = 0;        // 0: off
  float repetition_penalty =
      1;  // over prompt and output: positive logits are divided, negative multiplied (CTRL, arXiv 1909.05858)
  float presence_penalty = 0;   // over output tokens
  float frequency_penalty = 0;  // over output tokens, times their count
  int32_t history = -1;         // this sequence's row of `history`; -1: no penalties
  int32_t bias_begin = 0;       // its range [bias_begin, bias_end) of `biases`; tokens are distinct within it
  int32_t bias_end = 0;
  uint64_t seed = 0;
  int64_t position = 0;  // of the token being sampled, counted from the first prompt token
};

struct LogitBias {
  int32_t token;
  float value;  // added to the logit; -infinity forbids the token
};

// Tokens a sequence has seen: bit 31 is set for tokens of the prompt, the low 31 bits count those of the output.
using TokenCount = uint32_t;
inline constexpr TokenCount kPromptToken = 1u << 31;

// out[r] = logits[r] after penalties, bias, temperature, min-p, top-k, top-p, in this order; filtered tokens are
// -infinity. With temperature 0 all but the largest are. The probabilities are the softmax of it.   out, logits [R, V]
// rows [R]
void ProcessLogits(Mat<float> out, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
                   Mat<const TokenCount> history, Stream& stream);

// tokens[r] = argmax over v of ProcessLogits(r)[v] + g(seed, position, v); g = -ln(-ln u) is Gumbel noise, u from
// Philox4x32-10 (Salmon et al., SC'11) keyed by the seed with counter (v / 4, position), word v % 4; ties go to the
// lowest id. -1 where the logits hold a NaN or an infinity, or every token is forbidden.
void Sample(Vec<int32_t> tokens, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
            Mat<const TokenCount> history, Stream& stream);
size_t SampleWorkspaceBytes(int64_t vocab, const Stream& stream);  // for LogProbs too

// ++history[rows[r].history][tokens[r]] for each row that has a history and whose token is not negative.
//                                                                             history [*, V]  rows, tokens [R]
void CountTokens(Mat<TokenCount> history, Vec<const SamplingRow> rows, Vec<const int32_t> tokens, Stream& stream);

// Natural-log softmax of the raw logits (temperature 1, before any processing): chosen[r] of tokens[r], and the N
// likeliest tokens, best first, ties to the lowest id.                                    top_* [R, N]  N <= V
void LogProbs(Vec<float> chosen, Mat<float> top_values, Mat<int32_t> top_tokens, Mat<const float> logits,
              Vec<const int32_t> tokens, Stream& stream);

}  // namespace millrace
