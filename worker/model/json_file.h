// JSON that nobody vouches for: bounded in size and depth, no key twice in one object. This is the one place that
// catches what the JSON library throws. JsonFields reads the fields of one object and keeps the first complaint; it
// lives for one load.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace millrace {

// `what` names the text in messages.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view what);
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::filesystem::path& path, int64_t max_bytes);

// A value as it stands in a message: at most 64 bytes of its JSON.
std::string Quote(const nlohmann::json& value);

// A field that is absent or null takes its fallback; without one it is a complaint. After a complaint every read
// returns a value within its limits, and status() tells the first complaint.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const nlohmann::json* Find(absl::string_view name) const;  // null where absent or null
  int64_t Integer(absl::string_view name, int64_t min, int64_t max, std::optional<int64_t> fallback = {});
  double Real(absl::string_view name, double min, double max, std::optional<double> fallback = {});
  bool Flag(absl::string_view name, bool fallback);
  std::string Text(absl::string_view name, std::string fallback);

  void Complain(absl::string_view name, absl::string_view why);  // the message carries the value
  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json& object_;
  std::string where_;
  absl::Status status_;
};

}  // namespace millrace
