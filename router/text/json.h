// The one place where JSON text from outside becomes a tree: nothing throws, nesting and size are bounded before parsing.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace millrace {

inline constexpr int kMaxJsonDepth = 64;
inline constexpr size_t kMaxOrderedMembers = 1024;  // of one object; an ordered object is searched linearly

// `what` names the document in errors.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, const std::string& what);
// The same, with the keys of every object in the order of the text.
absl::StatusOr<nlohmann::ordered_json> ParseOrderedJson(std::string_view text, const std::string& what);

}  // namespace millrace
