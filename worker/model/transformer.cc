#include "worker/model/transformer.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/model/carver.h"
#include "worker/model/rope.h"

namespace millrace {
namespace {

template <class T>
Vec<const T> ViewOf(const std::vector<T>& values) {
  return {values.data(), static_cast<int64_t>(values.size())};
}

}  // namespace

ForwardInput ForwardInput::View(const StepInput& step) {
  const auto num_sequences = static_cast<int64_t>(step.context_len.size());
  return {ViewOf(step.tokens),
          ViewOf(step.positions),
          ViewOf(step.kv_slots),
          {ViewOf(step.query_start),
           ViewOf(step.context_len),
           {step.block_table.data(), num_sequences, step.block_table_width}},
          ViewOf(step.logit_rows)};
}

template <class A>
Mat<const float> Transformer<A>::ForwardFirst(int num_layers, const ForwardInput& in, const KvCache<A>& kv,
                                              Stream& stream) {
  const int64_t num_rows = in.tokens.size, num_logit_rows = in.logit_rows.size;
  const auto rows = [num_rows](Mat<A> all) { return all.Rows(0, num_rows); };
  const Mat<float> delta = activations_.delta.Rows(0, num_rows);
  Mat<float> x = activations_.residual.Rows(0, num_rows), sum = activations_.sum.Rows(0, num_rows);
  const Mat<A> h = rows(activations_.hidden);
  const Mat<A> qkv = rows(activations_.qkv), attention = rows(activations_.attention);
  const Mat<A> gate_up = rows(activations_.gate_up), activated = rows(activations_.activated);
  const RopeTable rope = {activations_.rope_cos, activations_.rope_sin};
  const float eps = config_.rms_norm_eps;
  const float scale = 1 / std::sqrt(static_cast<float>(config_.head_dim));

  // What a norm is taken of: x + added, which the op leaves in `sum`.
  const auto normed = [&](Mat<const float> added, Vec<const float> weight) {
    return NormedInput<A>{sum, x, added, weight, eps, h};
  };

  Embedding(x, weights_.embedding, in.tokens, stream);
  for (int i = 0; i < num_layers; ++i) {
    const LayerWeights& layer = weights_.layers[static_cast<size_t>(i)];
    const bool is_first = i == 0;
    NormLinear(qkv, normed(is_first ? Mat<const float>() : delta, layer.attention_norm), layer.qkv, layer.qkv_bias,
               stream);
    std::swap(x, sum);
    // Before attention reads: a sequence may read what another writes in this step.
    RopeAppend(qkv, kv.layer(i), layer.q_norm, layer.k_norm, eps, rope, in.positions, in.kv_slots, stream);
    PagedAttention(attention, qkv, kv.layer(i), in.attention, scale, stream);
    Linear<float, A>(delta, attention, layer.output, {}, stream);
    communicator_.AllReduce(delta, stream);

    NormGateUp(activated, normed(delta, layer.mlp_norm), layer.gate_up, gate_up, stream);
    std::swap(x, sum);
    Linear<float, A>(delta, activated, layer.down, {}, stream);
    communicator_.AllReduce(delta, stream);
  }
  AddRmsNorm(h, x, delta, weights_.final_norm, eps, stream);
  const Mat<float> logits = activations_.logits.Rows(0, num_logit_rows);
  if (num_logit_rows == 0) return logits;
  const Mat<A> last = activations_.last.Rows(0, num_logit_rows);
  GatherRows(last, h, in.logit_rows, stream);
  Linear<float, A>(logits, last, weights_.lm_head, {}, stream);
  return logits;
}

template <class A>
size_t Transformer<A>::Place(std::byte* memory, const StepLimits& limits) {
  const int64_t hidden = config_.hidden_size, dim = config_.head_dim, q = config_.num_heads * dim;
  Carver carver(memory);
  activations_ = {.residual = carver.TakeMat<float>(limits.rows, hidden),
                  .sum = carver.TakeMat<float>(limits.rows, hidden),
                  .hidden = carver.TakeMat<A>(limits.rows, hidden),
                  .delta = carver.TakeMat<float>(limits.rows, hidden),
                  .qkv = carver.TakeMat<A>(limits.rows, q + 2 * config_.num_kv_heads * dim),
                  .attention = carver.TakeMat<A>(limits.rows, q),
                  .gate_up = carver.TakeMat<A>(limits.rows, 2 * config_.intermediate_size),
                  .activated = carver.TakeMat<A>(limits.rows, config_.intermediate_size),
                  .last = carver.TakeMat<A>(limits.logit_rows, hidden),
                  .logits = carver.TakeMat<float>(limits.logit_rows, config_.vocab_size),
                  .rope_cos = carver.TakeMat<float>(limits.context, dim / 2),
                  .rope_sin = carver.TakeMat<float>(limits.context, dim / 2)};
  return carver.used();
}

template <class A>
absl::StatusOr<Transformer<A>> Transformer<A>::Load(const ModelConfig& config, const Checkpoint& checkpoint,
                                                    const StepLimits& limits, Stream& stream) {
  Transformer transformer;
  transformer.config_ = config;
  auto weights = LoadWeights(config, checkpoint, stream);
  if (!weights.ok()) return weights.status();
  transformer.weights_ = *std::move(weights);

  const size_t bytes = transformer.Place(nullptr, limits);
  transformer.memory_ = DeviceBuffer(bytes, stream);
  if (transformer.memory_.data() == nullptr)
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes of activations"));
  transformer.Place(transformer.memory_.data(), limits);
  const size_t table_size = static_cast<size_t>(limits.context * (config.head_dim / 2));
  std::vector<float> cos(table_size), sin(table_size);
  const auto table = [&](std::vector<float>& values) {
    return Mat<float>{values.data(), limits.context, config.head_dim / 2};
  };
  FillRopeTables(table(cos), table(sin), ComputeRopeFrequencies(config));
  stream.Copy(transformer.activations_.rope_cos.data, cos.data(), table_size * sizeof(float));
  stream.Copy(transformer.activations_.rope_sin.data, sin.data(), table_size * sizeof(float));

  const int64_t max_in = std::max(
      {int64_t{config.hidden_size}, int64_t{config.intermediate_size}, int64_t{config.num_heads} * config.head_dim});
  stream.ReserveWorkspace(LinearWorkspaceBytes(max_in, stream));
  stream.ReserveWorkspace(
      PagedAttentionWorkspaceBytes(limits.context, config.num_heads, config.num_kv_heads, config.head_dim, stream));
  return transformer;
}

template class Transformer<float>;
template class Transformer<bf16>;

}  // namespace millrace
