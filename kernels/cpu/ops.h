// The CPU's ops: ops.h with the preconditions already checked. Split over the stream's threads here, computed by
// isa.h's builds.
#pragma once

#include "kernels/ops.h"

namespace millrace::cpu {

void PackRows(PackedWeight dst, int64_t row_begin, Mat<const bf16> src, Stream& stream);

void Embedding(Mat<float> out, PackedWeight table, Vec<const int32_t> tokens, Stream& stream);
template <class A>
void RmsNorm(Mat<A> out, Mat<const float> x, Vec<const float> weight, float eps, Stream& stream);
template <class A>
void AddRmsNorm(Mat<A> out, Mat<float> residual, Mat<const float> delta, Vec<const float> weight, float eps,
                Stream& stream);
template <class Y, class A>
void Linear(Mat<Y> y, Mat<const A> x, PackedWeight w, Vec<const float> bias, Stream& stream);
template <class A>
void NormLinear(Mat<A> y, const NormedInput<A>& x, PackedWeight w, Vec<const float> bias, Stream& stream);
template <class A>
void NormGateUp(Mat<A> out, const NormedInput<A>& x, PackedWeight gate_up, Mat<A> products, Stream& stream);
template <class A>
void RopeAppend(Mat<A> qkv, KvLayer<A> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps, RopeTable rope,
                Vec<const int32_t> positions, Vec<const int32_t> slots, Stream& stream);
template <class A>
void PagedAttention(Mat<A> out, Mat<const A> qkv, KvLayer<A> kv, const AttentionBatch& batch, float scale,
                    Stream& stream);
template <class A>
void SiluMul(Mat<A> out, Mat<const A> gate_up, Stream& stream);
template <class A>
void Add(Mat<A> x, Mat<const A> delta, Stream& stream);
template <class A>
void GatherRows(Mat<A> out, Mat<const A> x, Vec<const int32_t> rows, Stream& stream);

void ProcessLogits(Mat<float> out, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
                   Mat<const TokenCount> history, Stream& stream);
void Sample(Vec<int32_t> tokens, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
            Mat<const TokenCount> history, Stream& stream);
void CountTokens(Mat<TokenCount> history, Vec<const SamplingRow> rows, Vec<const int32_t> tokens, Stream& stream);
void LogProbs(Vec<float> chosen, Mat<float> top_values, Mat<int32_t> top_tokens, Mat<const float> logits,
              Vec<const int32_t> tokens, Stream& stream);

size_t LinearWorkspaceBytes(int64_t max_in, int num_threads);
size_t PagedAttentionWorkspaceBytes(int head_dim, int num_threads);
size_t SampleWorkspaceBytes(int64_t vocab, int num_threads);

}  // namespace millrace::cpu
