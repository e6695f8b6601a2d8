#include "worker/model/model_config.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/fixtures.h"
#include "tests/worker/model/temp_folder.h"

namespace millrace {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

json Llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"vocab_size", 1024},
          {"hidden_size", 256},
          {"intermediate_size", 512},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"rms_norm_eps", 1e-5},
          {"max_position_embeddings", 512},
          {"eos_token_id", 2},
          {"torch_dtype", "bfloat16"}};
}

absl::StatusOr<ModelConfig> Load(const std::string& config, const std::string& generation_config = "") {
  const TempFolder folder;
  folder.Write("config.json", config);
  if (!generation_config.empty()) folder.Write("generation_config.json", generation_config);
  return ModelConfig::Load(folder.path());
}

std::string Complaint(const std::string& config) { return std::string(Load(config).status().message()); }
std::string ComplaintWith(const char* field, const json& value) {
  json config = Llama();
  config[field] = value;
  return Complaint(config.dump());
}

TEST(ModelConfig, ReadsTheOldSpelling) {
  json text = Llama();
  text["rope_theta"] = 5e5;
  text["rope_scaling"] = {{"rope_type", "llama3"},
                          {"factor", 8.0},
                          {"low_freq_factor", 1.0},
                          {"high_freq_factor", 4.0},
                          {"original_max_position_embeddings", 64}};
  const auto config = Load(text.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->head_dim, 64) << "absent, it is hidden_size / num_attention_heads";
  EXPECT_EQ(config->rope_theta, 5e5);
  EXPECT_EQ(config->rope_scaling.type, RopeScaling::Type::kLlama3);
  EXPECT_EQ(config->rope_scaling.factor, 8);
  EXPECT_EQ(config->rope_scaling.original_max_position, 64);
  EXPECT_FALSE(config->tied_embeddings || config->qkv_bias || config->qk_norm);
  EXPECT_THAT(config->eos_token_ids, ElementsAre(2));
}

TEST(ModelConfig, ReadsTheNewSpelling) {
  json text = Llama();
  text["architectures"] = {"Qwen3ForCausalLM"};
  text["head_dim"] = 128;
  text["rope_parameters"] = {{"rope_theta", 1000000}, {"rope_type", "default"}};
  text["dtype"] = "bfloat16";
  text["sliding_window"] = nullptr;
  text["use_sliding_window"] = false;
  text["tie_word_embeddings"] = true;
  const auto config = Load(text.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->architecture, Architecture::kQwen3);
  EXPECT_EQ(config->head_dim, 128);
  EXPECT_EQ(config->rope_theta, 1e6);
  EXPECT_EQ(config->rope_scaling.type, RopeScaling::Type::kNone);
  EXPECT_TRUE(config->tied_embeddings && config->qk_norm);
  EXPECT_FALSE(config->qkv_bias);
}

TEST(ModelConfig, YarnReachesBeyondTheTrainedLength) {
  json text = Llama();
  text["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 512}};
  const auto config = Load(text.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->max_position, 2048);
}

TEST(ModelConfig, TheGenerationConfigsListOfEndTokensWins) {
  EXPECT_THAT(Load(Llama().dump(), R"({"eos_token_id": [5, 7]})")->eos_token_ids, ElementsAre(5, 7));
  EXPECT_THAT(Load(Llama().dump(), R"({"eos_token_id": 5})")->eos_token_ids, ElementsAre(5));
  EXPECT_THAT(Load(Llama().dump(), R"({"temperature": 1})")->eos_token_ids, ElementsAre(2));
  EXPECT_THAT(std::string(Load(Llama().dump(), R"({"eos_token_id": [5, 1024]})").status().message()),
              HasSubstr("1024"));
}

TEST(ModelConfig, ReadsEveryFixture) {
  for (const char* name : {"llama-tiny-3x48", "qwen2-tiny-5x16", "qwen3-tiny-6x32", "qwen3-tiny-untied"}) {
    EXPECT_TRUE(ModelConfig::Load(Fixture(name)).ok()) << ModelConfig::Load(Fixture(name)).status();
  }
}

TEST(ModelConfig, AComplaintNamesFieldValueAndLimit) {
  EXPECT_THAT(ComplaintWith("hidden_size", -1), AllOf(HasSubstr("hidden_size is -1"), HasSubstr("65536")));
  EXPECT_THAT(ComplaintWith("num_hidden_layers", int64_t{1} << 40),
              AllOf(HasSubstr("num_hidden_layers is 1099511627776"), HasSubstr("512")));
  EXPECT_THAT(ComplaintWith("vocab_size", UINT64_MAX),
              AllOf(HasSubstr("vocab_size is 18446744073709551615"), HasSubstr("1048576")));
  EXPECT_THAT(ComplaintWith("vocab_size", "many"), AllOf(HasSubstr("vocab_size is \"many\""), HasSubstr("integer")));
  EXPECT_THAT(ComplaintWith("intermediate_size", 12.5), HasSubstr("intermediate_size is 12.5"));
  EXPECT_THAT(ComplaintWith("max_position_embeddings", nullptr), HasSubstr("max_position_embeddings is absent"));
  EXPECT_THAT(ComplaintWith("num_key_value_heads", 3),
              AllOf(HasSubstr("num_key_value_heads is 3"), HasSubstr("divide")));
  EXPECT_THAT(ComplaintWith("head_dim", 24), AllOf(HasSubstr("head_dim is 24"), HasSubstr("multiple of 16")));
  EXPECT_THAT(ComplaintWith("rms_norm_eps", 0), HasSubstr("rms_norm_eps is 0"));
  EXPECT_THAT(ComplaintWith("rope_theta", "1e4"), HasSubstr("rope_theta"));
  EXPECT_THAT(ComplaintWith("eos_token_id", {1, 1 << 30}), HasSubstr("1073741824"));
  EXPECT_THAT(ComplaintWith("eos_token_id", std::vector<int>(65)), HasSubstr("64"));
  EXPECT_THAT(ComplaintWith("architectures", {"GPT2LMHeadModel"}), HasSubstr("GPT2LMHeadModel"));
  EXPECT_THAT(ComplaintWith("vocab_size", std::string(1000, 'x')).size(), testing::Lt(400));
}

TEST(ModelConfig, RefusesWhatItDoesNotCompute) {
  EXPECT_THAT(ComplaintWith("hidden_act", "gelu"), HasSubstr("hidden_act is \"gelu\""));
  EXPECT_THAT(ComplaintWith("attention_bias", true), HasSubstr("attention_bias"));
  EXPECT_THAT(ComplaintWith("mlp_bias", true), HasSubstr("mlp_bias"));
  EXPECT_THAT(ComplaintWith("use_sliding_window", true), HasSubstr("use_sliding_window"));
  EXPECT_THAT(ComplaintWith("partial_rotary_factor", 0.5), HasSubstr("partial_rotary_factor"));
  EXPECT_THAT(ComplaintWith("layer_types", {"full_attention", "sliding_attention"}), HasSubstr("sliding_attention"));
  EXPECT_THAT(ComplaintWith("quantization_config", {{"quant_method", "awq"}}), HasSubstr("quantization_config"));
  EXPECT_THAT(ComplaintWith("rope_scaling", {{"rope_type", "longrope"}, {"factor", 2}}), HasSubstr("longrope"));
  EXPECT_THAT(ComplaintWith("rope_scaling", {{"rope_type", "linear"}}), HasSubstr("factor is absent"));
  EXPECT_THAT(ComplaintWith("rope_scaling",
                            {{"rope_type", "llama3"}, {"factor", 2}, {"low_freq_factor", 4}, {"high_freq_factor", 4}}),
              HasSubstr("high_freq_factor"));
  EXPECT_THAT(ComplaintWith("rope_scaling", "llama3"), HasSubstr("rope_scaling"));
}

TEST(ModelConfig, RefusesTextThatIsNoConfig) {
  const std::string deep = R"({"a":)" + std::string(100000, '[');
  EXPECT_THAT(Complaint(deep), HasSubstr("nested deeper than the limit of 32"));
  EXPECT_THAT(Complaint(R"({"vocab_size": 1, "vocab_size": 2})"), HasSubstr("twice"));
  EXPECT_THAT(Complaint(R"({"rope_theta": NaN})"), HasSubstr("not JSON"));
  EXPECT_THAT(Complaint(R"({"rope_theta": 1e999})"), HasSubstr("not JSON"));
  EXPECT_THAT(Complaint(""), HasSubstr("not JSON"));
  EXPECT_THAT(Complaint("[1]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(Complaint("\xff\xfe{}"), HasSubstr("not JSON"));
}

TEST(ModelConfig, ReadsNoMoreThanItsLimit) {
  const TempFolder folder;
  folder.Write("config.json", "{}");
  std::filesystem::resize_file(folder.path() / "config.json", std::uintmax_t{1} << 30);  // sparse
  EXPECT_THAT(std::string(ModelConfig::Load(folder.path()).status().message()),
              AllOf(HasSubstr("1073741824"), HasSubstr("1048576")));
  EXPECT_EQ(ModelConfig::Load(folder.path() / "absent").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace millrace
