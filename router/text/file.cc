#include "router/text/file.h"

#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace millrace {

absl::StatusOr<std::string> ReadFile(const std::filesystem::path& path, uint64_t max_bytes) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    return absl::NotFoundError(absl::StrCat("no file ", path.string()));
  }
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) return absl::UnavailableError(absl::StrCat(path.string(), ": ", error.message()));
  if (size > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), " has ", size, " bytes, limit ", max_bytes));
  }
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(size))) {
    return absl::UnavailableError(absl::StrCat("cannot read ", path.string()));
  }
  return text;
}

}  // namespace millrace
