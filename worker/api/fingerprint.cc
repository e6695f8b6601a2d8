#include "worker/api/fingerprint.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <memory>
#include <system_error>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

using Digest = std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)>;

bool Update(Digest& digest, const void* data, size_t bytes) { return EVP_DigestUpdate(digest.get(), data, bytes) == 1; }

absl::Status AddFile(const std::filesystem::path& path, Digest& digest) {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) return absl::NotFoundError(absl::StrCat("cannot read ", path.string()));
  const std::string header = absl::StrCat(path.filename().string(), "\n", size, "\n");
  bool ok = Update(digest, header.data(), header.size());
  std::vector<char> buffer(1 << 20);
  while (ok && file) {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    ok = Update(digest, buffer.data(), static_cast<size_t>(file.gcount()));
  }
  if (file.bad()) return absl::DataLossError(absl::StrCat("cannot read ", path.string(), " to its end"));
  return ok ? absl::OkStatus() : absl::InternalError("SHA-256 failed");
}

}  // namespace

absl::StatusOr<std::string> ModelFingerprint(const std::filesystem::path& model_dir) {
  std::vector<std::filesystem::path> files = {model_dir / "config.json"};
  std::error_code error;
  for (std::filesystem::directory_iterator entry(model_dir, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() == ".safetensors") files.push_back(entry->path());
  }
  if (error) return absl::NotFoundError(absl::StrCat("cannot list ", model_dir.string(), ": ", error.message()));
  std::sort(files.begin() + 1, files.end());

  Digest digest(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  if (digest == nullptr || EVP_DigestInit_ex(digest.get(), EVP_sha256(), nullptr) != 1) {
    return absl::InternalError("SHA-256 is not available");
  }
  for (const auto& file : files) {
    if (auto status = AddFile(file, digest); !status.ok()) return status;
  }
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes;
  unsigned int size = 0;
  if (EVP_DigestFinal_ex(digest.get(), bytes.data(), &size) != 1) return absl::InternalError("SHA-256 failed");
  const absl::string_view half(reinterpret_cast<const char*>(bytes.data()), size / 2);
  return absl::StrCat("cpu-", absl::BytesToHexString(half));
}

}  // namespace millrace
