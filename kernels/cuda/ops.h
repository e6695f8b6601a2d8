// The CUDA ops: ops.h with the preconditions already checked; views point into the GPU's memory. Each launches its
// kernels and returns.
#pragma once

#include "kernels/device_step.h"
#include "kernels/ops.h"

namespace millrace::cuda {

void PackRows(PackedWeight dst, int64_t row_begin, Mat<const bf16> src, Stream& stream);

void Embedding(Mat<float> out, PackedWeight table, Vec<const int32_t> tokens, Stream& stream);
void RmsNorm(Mat<bf16> out, Mat<const float> x, Vec<const float> weight, float eps, Stream& stream);
void AddRmsNorm(Mat<bf16> out, Mat<float> residual, Mat<const float> delta, Vec<const float> weight, float eps,
                Stream& stream);
void Linear(Mat<bf16> y, Mat<const bf16> x, PackedWeight w, Vec<const float> bias, Stream& stream);
void Linear(Mat<float> y, Mat<const bf16> x, PackedWeight w, Vec<const float> bias, Stream& stream);
void Normalise(const NormedInput<bf16>& x, Stream& stream);  // fills x.sum and x.rows
void NormLinear(Mat<bf16> y, const NormedInput<bf16>& x, PackedWeight w, Vec<const float> bias, Stream& stream);
void NormGateUp(Mat<bf16> out, const NormedInput<bf16>& x, PackedWeight gate_up, Mat<bf16> products, Stream& stream);
void RopeAppend(Mat<bf16> qkv, KvLayer<bf16> kv, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                RopeTable rope, Vec<const int32_t> positions, Vec<const int32_t> slots, Stream& stream);
void PagedAttention(Mat<bf16> out, Mat<const bf16> qkv, KvLayer<bf16> kv, const AttentionBatch& batch, float scale,
                    Stream& stream);
void SiluMul(Mat<bf16> out, Mat<const bf16> gate_up, Stream& stream);
void Add(Mat<bf16> x, Mat<const bf16> delta, Stream& stream);
void GatherRows(Mat<bf16> out, Mat<const bf16> x, Vec<const int32_t> rows, Stream& stream);

void ProcessLogits(Mat<float> out, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
                   Mat<const TokenCount> history, Stream& stream);
void Sample(Vec<int32_t> tokens, Mat<const float> logits, Vec<const SamplingRow> rows, Vec<const LogitBias> biases,
            Mat<const TokenCount> history, Stream& stream);
void CountTokens(Mat<TokenCount> history, Vec<const SamplingRow> rows, Vec<const int32_t> tokens, Stream& stream);
void LogProbs(Vec<float> chosen, Mat<float> top_values, Mat<int32_t> top_tokens, Mat<const float> logits,
              Vec<const int32_t> tokens, Stream& stream);

void LoadStep(const DeviceStep& to, const StagedSteps& from, Stream& stream);
void StoreTokens(const StagedSteps& to, const DeviceStep& step, Stream& stream);

size_t PagedAttentionWorkspaceBytes(int64_t max_context, int num_heads, int head_dim);
size_t SampleWorkspaceBytes(int64_t vocab, const Stream& stream);

}  // namespace millrace::cuda
