#include "worker/model/model_config.h"

#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "worker/model/json_file.h"

namespace millrace {
namespace {

constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr int64_t kMaxVocab = 1 << 20;
constexpr int64_t kMaxHidden = 1 << 16;
constexpr int64_t kMaxIntermediate = 1 << 18;
constexpr int64_t kMaxLayers = 512;
constexpr int64_t kMaxHeads = 512;
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxPosition = 1 << 20;
constexpr size_t kMaxEosTokens = 64;

void ReadArchitecture(JsonFields& fields, ModelConfig& config) {
  const nlohmann::json* names = fields.Find("architectures");
  const bool is_one_name = names != nullptr && names->is_array() && names->size() == 1 && names->front().is_string();
  const std::string name = is_one_name ? names->front().get<std::string>() : "";
  if (name == "LlamaForCausalLM") {
    config.architecture = Architecture::kLlama;
  } else if (name == "Qwen2ForCausalLM") {
    config.architecture = Architecture::kQwen2;
    config.qkv_bias = true;
  } else if (name == "Qwen3ForCausalLM") {
    config.architecture = Architecture::kQwen3;
    config.qk_norm = true;
  } else {
    fields.Complain("architectures",
                    absl::StrCat("it must name one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
                                 name.empty() ? "" : ", not ", name.substr(0, 64)));
  }
}

void ReadShape(JsonFields& fields, ModelConfig& config) {
  config.vocab_size = static_cast<int32_t>(fields.Integer("vocab_size", 1, kMaxVocab));
  config.hidden_size = static_cast<int>(fields.Integer("hidden_size", 1, kMaxHidden));
  config.intermediate_size = static_cast<int>(fields.Integer("intermediate_size", 1, kMaxIntermediate));
  config.num_layers = static_cast<int>(fields.Integer("num_hidden_layers", 1, kMaxLayers));
  config.num_heads = static_cast<int>(fields.Integer("num_attention_heads", 1, kMaxHeads));
  config.num_kv_heads = static_cast<int>(fields.Integer("num_key_value_heads", 1, kMaxHeads, config.num_heads));
  config.head_dim = static_cast<int>(fields.Integer("head_dim", 1, kMaxHeadDim, config.hidden_size / config.num_heads));
  config.max_position = fields.Integer("max_position_embeddings", 1, kMaxPosition);
  config.rms_norm_eps = static_cast<float>(fields.Real("rms_norm_eps", 1e-12, 1, 1e-6));
  config.tied_embeddings = fields.Flag("tie_word_embeddings", false);

  if (config.num_heads % config.num_kv_heads != 0) {
    fields.Complain("num_key_value_heads", absl::StrCat("it must divide num_attention_heads, ", config.num_heads));
  }
  if (config.head_dim < 16 || config.head_dim % 16 != 0 || config.head_dim > kMaxHeadDim) {
    fields.Complain("head_dim", absl::StrCat("the head dimension ", config.head_dim,
                                             " must be a multiple of 16 from 16 to ", kMaxHeadDim));
  }
}

// What a config may ask for that Forward does not compute.
void RefuseOthers(JsonFields& fields, const ModelConfig& config) {
  if (fields.Text("hidden_act", "silu") != "silu") fields.Complain("hidden_act", "only silu is computed");
  if (config.architecture != Architecture::kQwen2 && fields.Flag("attention_bias", false)) {
    fields.Complain("attention_bias", "only false is computed");
  }
  if (fields.Flag("mlp_bias", false)) fields.Complain("mlp_bias", "only false is computed");
  if (fields.Flag("use_sliding_window", false))
    fields.Complain("use_sliding_window", "only full attention is computed");
  if (fields.Real("partial_rotary_factor", 0, 1, 1) != 1)
    fields.Complain("partial_rotary_factor", "only 1 is computed");
  if (fields.Find("quantization_config") != nullptr)
    fields.Complain("quantization_config", "only bf16, f16 and f32 weights are computed");
  const nlohmann::json* layer_types = fields.Find("layer_types");
  if (layer_types != nullptr && layer_types->is_array()) {
    for (const nlohmann::json& type : *layer_types) {
      if (type != "full_attention")
        fields.Complain("layer_types", absl::StrCat("only full_attention is computed, not ", Quote(type)));
    }
  }
}

absl::Status ReadRope(const nlohmann::json& json, JsonFields& fields, const std::string& where, ModelConfig& config) {
  // transformers 5 keeps theta with the scaling; 4 keeps theta beside it and leaves rope_scaling null where there is
  // none.
  const char* name = fields.Find("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
  config.rope_theta = fields.Real("rope_theta", 1, 1e12, 10000);
  if (fields.Find(name) == nullptr) return absl::OkStatus();
  if (!json[name].is_object()) fields.Complain(name, "it must be an object");
  JsonFields rope(json[name], absl::StrCat(where, ": ", name));
  config.rope_theta = rope.Real("rope_theta", 1, 1e12, config.rope_theta);

  const std::string type = rope.Text("rope_type", rope.Text("type", "default"));
  RopeScaling& scaling = config.rope_scaling;
  if (type == "default") return rope.status();
  scaling.factor = rope.Real("factor", 1, 4096);
  scaling.original_max_position =
      rope.Real("original_max_position_embeddings", 1, kMaxPosition, static_cast<double>(config.max_position));
  if (type == "linear") {
    scaling.type = RopeScaling::Type::kLinear;
  } else if (type == "llama3") {
    scaling.type = RopeScaling::Type::kLlama3;
    scaling.low_freq_factor = rope.Real("low_freq_factor", 1e-3, 1e6, 1);
    scaling.high_freq_factor = rope.Real("high_freq_factor", 1e-3, 1e6, 4);
    if (scaling.high_freq_factor <= scaling.low_freq_factor) {
      rope.Complain("high_freq_factor", absl::StrCat("it must be above low_freq_factor, ", scaling.low_freq_factor));
    }
  } else if (type == "yarn") {
    scaling.type = RopeScaling::Type::kYarn;
    scaling.beta_fast = rope.Real("beta_fast", 1e-3, 1e6, 32);
    scaling.beta_slow = rope.Real("beta_slow", 1e-3, 1e6, 1);
    scaling.attention_factor = rope.Real("attention_factor", 0, 100, 0);
    scaling.mscale = rope.Real("mscale", 0, 100, 0);
    scaling.mscale_all_dim = rope.Real("mscale_all_dim", 0, 100, 0);
    if (!rope.Flag("truncate", true)) rope.Complain("truncate", "only true is computed");
    // Model cards ask for YaRN by adding this object alone, so the length that it reaches is not in
    // max_position_embeddings.
    const auto reach = static_cast<int64_t>(scaling.original_max_position * scaling.factor);
    config.max_position = std::min(std::max(config.max_position, reach), kMaxPosition);
  } else {
    rope.Complain("rope_type", "it must be one of default, linear, llama3, yarn");
  }
  return rope.status();
}

void ReadEos(JsonFields& fields, ModelConfig& config) {
  const nlohmann::json* ids = fields.Find("eos_token_id");
  if (ids == nullptr) return;
  config.eos_token_ids.clear();
  const nlohmann::json list = ids->is_array() ? *ids : nlohmann::json::array({*ids});
  if (list.size() > kMaxEosTokens)
    return fields.Complain("eos_token_id", absl::StrCat("the limit is ", kMaxEosTokens, " ids"));
  for (const nlohmann::json& id : list) {
    if (!id.is_number_integer() || id < 0 || id >= config.vocab_size) {
      return fields.Complain("eos_token_id",
                             absl::StrCat("the id ", Quote(id), " must be below vocab_size, ", config.vocab_size));
    }
    config.eos_token_ids.push_back(id.get<int32_t>());
  }
}

}  // namespace

absl::StatusOr<ModelConfig> ModelConfig::Load(const std::filesystem::path& model_dir) {
  const std::filesystem::path path = model_dir / "config.json";
  const auto json = ReadJsonFile(path, kMaxConfigBytes);
  if (!json.ok()) return json.status();
  if (!json->is_object()) return absl::InvalidArgumentError(absl::StrCat(path.string(), " is not a JSON object"));
  ModelConfig config;
  JsonFields fields(*json, path.string());
  ReadArchitecture(fields, config);
  ReadShape(fields, config);
  RefuseOthers(fields, config);
  const absl::Status rope = ReadRope(*json, fields, path.string(), config);
  ReadEos(fields, config);
  if (!fields.status().ok()) return fields.status();
  if (!rope.ok()) return rope;

  const std::filesystem::path generation_path = model_dir / "generation_config.json";
  std::error_code error;
  if (std::filesystem::exists(generation_path, error)) {
    const auto generation = ReadJsonFile(generation_path, kMaxConfigBytes);
    if (!generation.ok()) return generation.status();
    JsonFields generation_fields(*generation, generation_path.string());
    ReadEos(generation_fields, config);
    if (!generation_fields.status().ok()) return generation_fields.status();
  }
  return config;
}

absl::StatusOr<ModelConfig> LoadDraftConfig(const std::filesystem::path& model_dir, const ModelConfig& target) {
  auto config = ModelConfig::Load(model_dir);
  if (!config.ok()) return config.status();
  if (config->vocab_size != target.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("draft model ", model_dir.string(), ": its vocab_size is ",
                                                   config->vocab_size, "; the limit is the target's, ",
                                                   target.vocab_size));
  }
  if (config->max_position < target.max_position) {
    return absl::InvalidArgumentError(
        absl::StrCat("draft model ", model_dir.string(), ": its context is ", config->max_position,
                     " tokens; the limit is at least the target's, ", target.max_position));
  }
  return config;
}

}  // namespace millrace
