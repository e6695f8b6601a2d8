// Reads a small file of a model directory into memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/status/statusor.h"

namespace millrace {

// NOT_FOUND when there is no such file, INVALID_ARGUMENT when it holds more than `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::filesystem::path& path, uint64_t max_bytes);

}  // namespace millrace
