// One line of `millrace complete --jsonl` as a request. Ranges are the router's business; here only the shape is
// checked: known names, types, integers that fit. Stateless; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "millrace/v1/inference.pb.h"
#include "nlohmann/json.hpp"

namespace millrace {

struct CompletionRequest {
  v1::GenerateRequest request;
  std::optional<int64_t> deadline_ms;  // from when the call starts
};
// INVALID_ARGUMENT names the field.
absl::StatusOr<CompletionRequest> ParseCompletion(const std::string& line);

// `messages` or one of its companions: true when `key` is such a field, which is then put into `chat`.
absl::StatusOr<bool> SetChatField(absl::string_view key, const nlohmann::ordered_json& value, v1::Chat& chat);

// The JSON text, in UTF-8.
std::string TextOf(const nlohmann::ordered_json& value);
absl::StatusOr<bool> BoolOf(absl::string_view field, const nlohmann::ordered_json& value);
absl::StatusOr<std::string> StringOf(absl::string_view field, const nlohmann::ordered_json& value);
absl::Status AppendTokenIds(absl::string_view field, const nlohmann::ordered_json& value,
                            google::protobuf::RepeatedField<int32_t>& ids);

}  // namespace millrace
