#include "router/text/tokenizer_config.h"

#include "router/text/file.h"
#include "router/text/json.h"

namespace millrace {
namespace {

constexpr uint64_t kMaxConfigBytes = 16 << 20;

// A token is written as its text or as an added token's object with the text as "content".
std::string TokenText(const nlohmann::json& config, const char* key) {
  const auto it = config.find(key);
  if (it == config.end()) return "";
  if (it->is_string()) return it->get<std::string>();
  if (it->is_object() && it->contains("content") && (*it)["content"].is_string()) return (*it)["content"];
  return "";
}

std::optional<std::string> ChatTemplateText(const nlohmann::json& config) {
  const auto it = config.find("chat_template");
  if (it == config.end()) return std::nullopt;
  if (it->is_string()) return it->get<std::string>();
  if (!it->is_array()) return std::nullopt;
  for (const auto& entry : *it) {
    if (!entry.is_object() || !entry.contains("name") || !entry.contains("template")) continue;
    if (entry["name"] == "default" && entry["template"].is_string()) return entry["template"].get<std::string>();
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<TokenizerConfig> TokenizerConfig::Load(const std::filesystem::path& model_dir) {
  const absl::StatusOr<std::string> text = ReadFile(model_dir / "tokenizer_config.json", kMaxConfigBytes);
  if (absl::IsNotFound(text.status())) return TokenizerConfig();
  if (!text.ok()) return text.status();
  const absl::StatusOr<nlohmann::json> json = ParseJson(*text, "tokenizer_config.json");
  if (!json.ok()) return json.status();
  if (!json->is_object()) return absl::InvalidArgumentError("tokenizer_config.json: not an object");
  TokenizerConfig config;
  config.bos_token = TokenText(*json, "bos_token");
  config.eos_token = TokenText(*json, "eos_token");
  const auto add_bos = json->find("add_bos_token");
  if (add_bos != json->end() && add_bos->is_boolean()) config.add_bos_token = add_bos->get<bool>();
  config.chat_template = ChatTemplateText(*json);
  return config;
}

}  // namespace millrace
