// The one place where JSON text from outside becomes a tree: nothing throws, nesting and size are bounded before
// parsing.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace millrace {

inline constexpr int kMaxJsonDepth = 64;
inline constexpr size_t kMaxTemplateMembers = 1024;  // of one object that a chat template sees

// `what` names the document in errors.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, const std::string& what);
// The same, with members in their order; refused beyond kMaxTemplateMembers, since such objects are searched linearly.
absl::StatusOr<nlohmann::ordered_json> ParseOrderedJson(std::string_view text, const std::string& what);

// Whether nesting and the largest object stay within bounds. Says nothing about syntax.
absl::Status CheckJsonShape(std::string_view text, const std::string& what, size_t max_members);

}  // namespace millrace
