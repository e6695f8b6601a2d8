// One safetensors file, mapped read-only. Open validates the whole header before anything is sized from it, and the
// file's length against the header, so that no later read leaves the map. Immutable after Open; tensors are views that
// live as long as the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/tensor.h"

namespace millrace {

struct Tensor {
  enum class Type : uint8_t { kBf16, kF16, kF32, kOther };  // kOther: known to the format, not readable here

  Type type = Type::kOther;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // little-endian, row-major, not necessarily aligned

  // REQUIRES, both: type is not kOther. Weights are bf16: wider types are rounded to nearest even. The matrix is the
  // file's own bytes where they are aligned bf16, otherwise it is written into `staging`, and lives no longer than
  // that.
  Mat<const bf16> AsMatrix(std::vector<bf16>& staging) const;
  void CopyTo(Vec<float> out) const;
};

class SafetensorsFile {
 public:
  static absl::StatusOr<SafetensorsFile> Open(const std::filesystem::path& path);

  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }

  // The tensor, proven to be readable and of this shape.
  absl::StatusOr<Tensor> Get(absl::string_view name, const std::vector<int64_t>& shape) const;

 private:
  struct Unmap {
    size_t bytes;
    void operator()(const std::byte* data) const;
  };

  SafetensorsFile() = default;
  absl::Status ReadHeader(absl::string_view header, std::span<const std::byte> data);

  std::string path_;
  std::unique_ptr<const std::byte, Unmap> map_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace millrace
