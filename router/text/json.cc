#include "router/text/json.h"

#include <algorithm>
#include <array>
#include <exception>
#include <limits>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

struct Shape {
  int depth = 0;            // the deepest nesting of brackets outside of strings
  size_t most_members = 0;  // of one object
};

Shape Measure(std::string_view text) {
  Shape shape;
  int depth = 0;
  std::array<size_t, kMaxJsonDepth + 1> members = {};  // of the open object at each depth
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      shape.depth = std::max(shape.depth, ++depth);
      if (depth > kMaxJsonDepth) break;
      members[depth] = 0;
    } else if (c == '}' || c == ']') {
      if (--depth < 0) break;
    } else if (c == ':') {
      shape.most_members = std::max(shape.most_members, ++members[depth]);
    }
  }
  return shape;
}

}  // namespace

absl::Status CheckJsonShape(std::string_view text, const std::string& what, size_t max_members) {
  const Shape shape = Measure(text);
  if (shape.depth > kMaxJsonDepth) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": JSON nested deeper than ", kMaxJsonDepth));
  }
  if (shape.most_members > max_members) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": JSON object with ", shape.most_members, " members, limit ", max_members));
  }
  return absl::OkStatus();
}

namespace {

template <class Json>
absl::StatusOr<Json> Parse(std::string_view text, const std::string& what, size_t max_members) {
  const absl::Status shape = CheckJsonShape(text, what, max_members);
  if (!shape.ok()) return shape;
  try {
    return Json::parse(text);
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": not JSON: ", error.what()));
  }
}

}  // namespace

absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, const std::string& what) {
  return Parse<nlohmann::json>(text, what, std::numeric_limits<size_t>::max());
}

absl::StatusOr<nlohmann::ordered_json> ParseOrderedJson(std::string_view text, const std::string& what) {
  return Parse<nlohmann::ordered_json>(text, what, kMaxTemplateMembers);
}

}  // namespace millrace
