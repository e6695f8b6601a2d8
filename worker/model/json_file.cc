#include "worker/model/json_file.h"

#include <cmath>
#include <fstream>
#include <unordered_set>
#include <vector>

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

constexpr int kMaxDepth = 32;
constexpr size_t kMaxQuotedBytes = 64;

struct Refused {
  std::string why;
};

}  // namespace

absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view what) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::unordered_set<std::string>> keys;  // of the objects that are open
  const auto watch = [&keys](int depth, Event event, nlohmann::json& value) {
    if (depth > kMaxDepth) throw Refused{absl::StrCat("is nested deeper than the limit of ", kMaxDepth)};
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second) {
      throw Refused{absl::StrCat("has the key ", Quote(value), " twice")};
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, watch);
  } catch (const Refused& refused) {
    return absl::InvalidArgumentError(absl::StrCat(what, " ", refused.why));
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is not JSON: ", std::string(error.what()).substr(0, 200)));
  }
}

absl::StatusOr<nlohmann::json> ReadJsonFile(const std::filesystem::path& path, int64_t max_bytes) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::NotFoundError(absl::StrCat(path.string(), " is not a file"));
  }
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path, error));
  if (error || bytes > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), " has ", bytes, " bytes; the limit is ", max_bytes));
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), bytes);
  if (file.gcount() != bytes) return absl::UnavailableError(absl::StrCat(path.string(), " cannot be read"));
  return ParseJson(text, path.string());
}

std::string Quote(const nlohmann::json& value) {
  std::string text;
  try {
    if (value.is_structured()) {
      text = absl::StrCat("an ", value.type_name(), " of ", value.size());
    } else {
      text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    }
  } catch (const nlohmann::json::exception&) {
    text = "unprintable";
  }
  return text.size() <= kMaxQuotedBytes ? text : absl::StrCat(text.substr(0, kMaxQuotedBytes), "…");
}

const nlohmann::json* JsonFields::Find(absl::string_view name) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(std::string(name));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

void JsonFields::Complain(absl::string_view name, absl::string_view why) {
  if (!status_.ok()) return;
  const nlohmann::json* value = Find(name);
  status_ = absl::InvalidArgumentError(absl::StrCat(
      where_, ": ", name, value == nullptr ? " is absent" : absl::StrCat(" is ", Quote(*value)), "; ", why));
}

int64_t JsonFields::Integer(absl::string_view name, int64_t min, int64_t max, std::optional<int64_t> fallback) {
  const nlohmann::json* value = Find(name);
  if (value == nullptr && fallback) return *fallback;
  const bool is_integer = value != nullptr && value->is_number_integer();
  const bool is_huge = is_integer && value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX;
  if (is_integer && !is_huge && value->get<int64_t>() >= min && value->get<int64_t>() <= max)
    return value->get<int64_t>();
  Complain(name, absl::StrCat("it must be an integer from ", min, " to ", max));
  return min;
}

double JsonFields::Real(absl::string_view name, double min, double max, std::optional<double> fallback) {
  const nlohmann::json* value = Find(name);
  if (value == nullptr && fallback) return *fallback;
  if (value != nullptr && value->is_number()) {
    const auto number = value->get<double>();
    if (std::isfinite(number) && number >= min && number <= max) return number;
  }
  Complain(name, absl::StrCat("it must be a number from ", min, " to ", max));
  return min;
}

bool JsonFields::Flag(absl::string_view name, bool fallback) {
  const nlohmann::json* value = Find(name);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Complain(name, "it must be true or false");
  return fallback;
}

std::string JsonFields::Text(absl::string_view name, std::string fallback) {
  const nlohmann::json* value = Find(name);
  if (value == nullptr) return fallback;
  if (value->is_string()) return value->get<std::string>();
  Complain(name, "it must be a string");
  return fallback;
}

}  // namespace millrace
