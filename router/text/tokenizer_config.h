// What the router wants of a model directory's tokenizer_config.json. A plain value; a missing file gives an empty one.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace millrace {

struct TokenizerConfig {
  std::string bos_token, eos_token;  // empty when the model has none
  std::optional<bool> add_bos_token;
  std::optional<std::string> chat_template;  // the only one, or the one named "default"

  static absl::StatusOr<TokenizerConfig> Load(const std::filesystem::path& model_dir);
};

}  // namespace millrace
