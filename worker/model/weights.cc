#include "worker/model/weights.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/ops.h"
#include "worker/model/carver.h"

namespace millrace {
namespace {

// Where one tensor of the checkpoint goes: into rows from `begin` of a packed matrix, or into elements from `begin` of
// a vector.
struct MatrixSource {
  std::string name;
  const PackedWeight* to;
  int64_t begin, rows;
};
struct VectorSource {
  std::string name;
  const Vec<float>* to;
  int64_t begin, size;
};
struct Sources {
  std::vector<MatrixSource> matrices;
  std::vector<VectorSource> vectors;
};

void Place(Weights& weights, const ModelConfig& config, Carver carver, Device device, size_t* used) {
  const int64_t hidden = config.hidden_size, ffn = config.intermediate_size, dim = config.head_dim;
  const int64_t q = config.num_heads * dim, qkv = q + 2 * config.num_kv_heads * dim;
  const auto matrix = [&](int64_t out, int64_t in) {
    return PackedWeight{reinterpret_cast<bf16*>(carver.TakeBytes(PackedWeightBytes(out, in, device))), out, in};
  };
  const auto vector = [&](int64_t size) { return carver.TakeVec<float>(size); };
  weights.embedding = matrix(config.vocab_size, hidden);
  weights.layers.resize(static_cast<size_t>(config.num_layers));
  for (LayerWeights& layer : weights.layers) {
    layer.attention_norm = vector(hidden);
    layer.qkv = matrix(qkv, hidden);
    if (config.qkv_bias) layer.qkv_bias = vector(qkv);
    if (config.qk_norm) layer.q_norm = vector(dim);
    if (config.qk_norm) layer.k_norm = vector(dim);
    layer.output = matrix(hidden, q);
    layer.mlp_norm = vector(hidden);
    layer.gate_up = matrix(2 * ffn, hidden);
    layer.down = matrix(hidden, ffn);
  }
  weights.final_norm = vector(hidden);
  weights.lm_head = config.tied_embeddings ? weights.embedding : matrix(config.vocab_size, hidden);
  *used = carver.used();
}

// The names of the checkpoint, as transformers writes them for the three architectures.
Sources NameSources(const Weights& weights, const ModelConfig& config) {
  const int64_t ffn = config.intermediate_size, dim = config.head_dim;
  const int64_t q = config.num_heads * dim, kv = config.num_kv_heads * dim;
  Sources sources;
  const auto matrix = [&](std::string name, const PackedWeight& to, int64_t begin, int64_t rows) {
    sources.matrices.push_back({absl::StrCat(name, ".weight"), &to, begin, rows});
  };
  const auto vector = [&](std::string name, const Vec<float>& to, int64_t begin, int64_t size) {
    sources.vectors.push_back({std::move(name), &to, begin, size});
  };
  matrix("model.embed_tokens", weights.embedding, 0, config.vocab_size);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& layer = weights.layers[i];
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    const std::string attention = prefix + "self_attn.";
    matrix(attention + "q_proj", layer.qkv, 0, q);
    matrix(attention + "k_proj", layer.qkv, q, kv);
    matrix(attention + "v_proj", layer.qkv, q + kv, kv);
    matrix(attention + "o_proj", layer.output, 0, config.hidden_size);
    matrix(prefix + "mlp.gate_proj", layer.gate_up, 0, ffn);
    matrix(prefix + "mlp.up_proj", layer.gate_up, ffn, ffn);
    matrix(prefix + "mlp.down_proj", layer.down, 0, config.hidden_size);
    vector(prefix + "input_layernorm.weight", layer.attention_norm, 0, config.hidden_size);
    vector(prefix + "post_attention_layernorm.weight", layer.mlp_norm, 0, config.hidden_size);
    if (config.qkv_bias) {
      vector(attention + "q_proj.bias", layer.qkv_bias, 0, q);
      vector(attention + "k_proj.bias", layer.qkv_bias, q, kv);
      vector(attention + "v_proj.bias", layer.qkv_bias, q + kv, kv);
    }
    if (config.qk_norm) {
      vector(attention + "q_norm.weight", layer.q_norm, 0, dim);
      vector(attention + "k_norm.weight", layer.k_norm, 0, dim);
    }
  }
  vector("model.norm.weight", weights.final_norm, 0, config.hidden_size);
  if (!config.tied_embeddings) matrix("lm_head", weights.lm_head, 0, config.vocab_size);
  return sources;
}

}  // namespace

absl::StatusOr<Weights> LoadWeights(const ModelConfig& config, const Checkpoint& checkpoint, Stream& stream) {
  Weights weights;
  size_t bytes = 0;
  Place(weights, config, Carver(nullptr), stream.device(), &bytes);
  const Sources sources = NameSources(weights, config);

  std::vector<Tensor> matrices, vectors;  // in the order of `sources`
  for (const MatrixSource& source : sources.matrices) {
    auto tensor = checkpoint.Get(source.name, {source.rows, source.to->in});
    if (!tensor.ok()) return tensor.status();
    matrices.push_back(*std::move(tensor));
  }
  for (const VectorSource& source : sources.vectors) {
    auto tensor = checkpoint.Get(source.name, {source.size});
    if (!tensor.ok()) return tensor.status();
    vectors.push_back(*std::move(tensor));
  }

  weights.memory = DeviceBuffer(bytes, stream);
  if (weights.memory.data() == nullptr)
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes of weights"));
  Place(weights, config, Carver(weights.memory.data()), stream.device(), &bytes);
  std::vector<bf16> staging;
  for (size_t i = 0; i < matrices.size(); ++i) {
    PackRows(*sources.matrices[i].to, sources.matrices[i].begin, matrices[i].AsMatrix(staging), stream);
    stream.Synchronize();  // staging is written again
  }
  std::vector<float> values;
  for (size_t i = 0; i < vectors.size(); ++i) {
    const VectorSource& source = sources.vectors[i];
    values.resize(static_cast<size_t>(source.size));
    vectors[i].CopyTo({values.data(), source.size});
    stream.Copy(source.to->data + source.begin, values.data(), values.size() * sizeof(float));
  }
  return weights;
}

}  // namespace millrace
