// The stages around BPE as tokenizer.json describes them: normalizer, pre_tokenizer, post_processor.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "router/text/pre_tokenizer.h"

namespace millrace {

absl::Status ParseNormalizer(const nlohmann::json& normalizer, bool& nfc);
absl::StatusOr<PreTokenizer> ParsePreTokenizer(const nlohmann::json& pre_tokenizer);
// Ids put before and after a single text. Whether they exist is the caller's to check.
absl::Status ParsePostProcessor(const nlohmann::json& post_processor, std::vector<int32_t>& prefix,
                                std::vector<int32_t>& suffix);

}  // namespace millrace
