#include "worker/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/model/json_file.h"

namespace millrace {
namespace {

constexpr uint64_t kMaxHeaderBytes = 16 << 20;
constexpr size_t kMaxDimensions = 8;
static_assert(std::endian::native == std::endian::little);

struct TypeEntry {
  const char* name;
  int64_t bytes;
  Tensor::Type type;
};
constexpr TypeEntry kTypes[] = {
    {"BF16", 2, Tensor::Type::kBf16}, {"F16", 2, Tensor::Type::kF16},       {"F32", 4, Tensor::Type::kF32},
    {"F64", 8, Tensor::Type::kOther}, {"F8_E4M3", 1, Tensor::Type::kOther}, {"F8_E5M2", 1, Tensor::Type::kOther},
    {"I64", 8, Tensor::Type::kOther}, {"I32", 4, Tensor::Type::kOther},     {"I16", 2, Tensor::Type::kOther},
    {"I8", 1, Tensor::Type::kOther},  {"U64", 8, Tensor::Type::kOther},     {"U32", 4, Tensor::Type::kOther},
    {"U16", 2, Tensor::Type::kOther}, {"U8", 1, Tensor::Type::kOther},      {"BOOL", 1, Tensor::Type::kOther},
};

// A size as the header gives it, or -1.
int64_t Size(const nlohmann::json& value) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX ? value.get<int64_t>() : -1;
}

// Empty: the entry is well-formed, and `tensor` is what it says. Otherwise, what is wrong.
std::string ReadEntry(const nlohmann::json& entry, std::span<const std::byte> data, Tensor& tensor) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets")) {
    return "is not an object of dtype, shape and data_offsets";
  }
  const nlohmann::json& shape = entry["shape"];
  const nlohmann::json& offsets = entry["data_offsets"];
  const auto* type = std::ranges::find_if(kTypes, [&](const TypeEntry& known) { return entry["dtype"] == known.name; });
  if (type == std::end(kTypes)) return absl::StrCat("has the unknown dtype ", Quote(entry["dtype"]));
  if (!shape.is_array() || shape.size() > kMaxDimensions) {
    return absl::StrCat("has the shape ", Quote(shape), "; the limit is ", kMaxDimensions, " dimensions");
  }
  if (!offsets.is_array() || offsets.size() != 2)
    return absl::StrCat("has the data_offsets ", Quote(offsets), ", not two numbers");

  int64_t bytes = type->bytes;
  for (const nlohmann::json& dimension : shape) {
    const int64_t n = Size(dimension);
    if (n < 0 || __builtin_mul_overflow(bytes, n, &bytes))
      return absl::StrCat("has the impossible dimension ", Quote(dimension));
    tensor.shape.push_back(n);
  }
  const int64_t begin = Size(offsets[0]), end = Size(offsets[1]);
  if (begin < 0 || end < begin || end > static_cast<int64_t>(data.size())) {
    return absl::StrCat("has the data_offsets ", Quote(offsets[0]), " to ", Quote(offsets[1]), " in ", data.size(),
                        " bytes of data");
  }
  if (end - begin != bytes) return absl::StrCat("has ", end - begin, " bytes; its shape and dtype need ", bytes);
  tensor.type = type->type;
  tensor.bytes = data.subspan(static_cast<size_t>(begin), static_cast<size_t>(bytes));
  return "";
}

float HalfToFloat(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, mantissa = half & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float subnormal = std::ldexp(static_cast<float>(mantissa), -24);
  return sign != 0 ? -subnormal : subnormal;
}

template <class To>
void Convert(const Tensor& tensor, To* out) {
  const auto each = [&]<class Stored>(auto to_float, Stored stored) {
    const std::byte* in = tensor.bytes.data();
    for (size_t i = 0; i < tensor.bytes.size(); i += sizeof(Stored)) {
      std::memcpy(&stored, in + i, sizeof(Stored));
      *out++ = To(to_float(stored));
    }
  };
  switch (tensor.type) {
    case Tensor::Type::kBf16:
      return each([](bf16 x) { return static_cast<float>(x); }, bf16{});
    case Tensor::Type::kF16:
      return each(HalfToFloat, uint16_t{});
    case Tensor::Type::kF32:
      return each([](float x) { return x; }, float{});
    case Tensor::Type::kOther:
      return;
  }
}

}  // namespace

Mat<const bf16> Tensor::AsMatrix(std::vector<bf16>& staging) const {
  const int64_t rows = shape.front(), cols = shape.back();
  if (type == Type::kBf16 && reinterpret_cast<uintptr_t>(bytes.data()) % alignof(bf16) == 0) {
    return {reinterpret_cast<const bf16*>(bytes.data()), rows, cols};
  }
  staging.resize(static_cast<size_t>(rows * cols));
  Convert(*this, staging.data());
  return {staging.data(), rows, cols};
}

void Tensor::CopyTo(Vec<float> out) const { Convert(*this, out.data); }

void SafetensorsFile::Unmap::operator()(const std::byte* data) const { munmap(const_cast<std::byte*>(data), bytes); }

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::filesystem::path& path) {
  SafetensorsFile file;
  file.path_ = path.string();
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    return absl::NotFoundError(absl::StrCat(file.path_, " is not a file"));
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, file.path_);
  const absl::Cleanup close_fd = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, file.path_);
  const auto size = static_cast<uint64_t>(info.st_size);
  uint64_t header_bytes = 0;
  if (size < sizeof(header_bytes))
    return absl::InvalidArgumentError(absl::StrCat(file.path_, " has ", size, " bytes, too few for a header"));

  void* map = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (map == MAP_FAILED) return absl::ErrnoToStatus(errno, file.path_);
  file.map_ = {static_cast<const std::byte*>(map), Unmap{size}};
  std::memcpy(&header_bytes, map, sizeof(header_bytes));
  const uint64_t limit = std::min(kMaxHeaderBytes, size - sizeof(header_bytes));
  if (header_bytes > limit) {
    return absl::InvalidArgumentError(
        absl::StrCat(file.path_, ": the header has ", header_bytes, " bytes; the limit is ", limit));
  }
  const std::byte* header = file.map_.get() + sizeof(header_bytes);
  const absl::Status status = file.ReadHeader({reinterpret_cast<const char*>(header), header_bytes},
                                              {header + header_bytes, size - sizeof(header_bytes) - header_bytes});
  if (!status.ok()) return status;
  madvise(map, size, MADV_WILLNEED);
  return file;
}

absl::Status SafetensorsFile::ReadHeader(absl::string_view header, std::span<const std::byte> data) {
  const auto json = ParseJson(header, absl::StrCat(path_, ": the header"));
  if (!json.ok()) return json.status();
  if (!json->is_object()) return absl::InvalidArgumentError(absl::StrCat(path_, ": the header is not a JSON object"));
  std::vector<std::pair<const Tensor*, const std::string*>> in_order;
  for (const auto& [name, entry] : json->items()) {
    if (name == "__metadata__") continue;
    Tensor tensor;
    const std::string wrong = ReadEntry(entry, data, tensor);
    if (!wrong.empty()) return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor ", Quote(name), " ", wrong));
    const auto it = tensors_.emplace(name, std::move(tensor)).first;
    in_order.emplace_back(&it->second, &it->first);
  }
  // By begin, then end: an empty tensor stands before the one that begins where it does.
  std::ranges::sort(in_order, {}, [](const auto& entry) {
    return std::pair(entry.first->bytes.data(), entry.first->bytes.data() + entry.first->bytes.size());
  });
  const std::byte* expected = data.data();
  for (const auto& [tensor, name] : in_order) {
    if (tensor->bytes.data() != expected) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor ", Quote(*name), " begins at ",
                                                     tensor->bytes.data() - data.data(), "; the one before it ends at ",
                                                     expected - data.data()));
    }
    expected += tensor->bytes.size();
  }
  if (expected != data.data() + data.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, " has ", data.size(), " bytes of data; its header describes ", expected - data.data()));
  }
  return absl::OkStatus();
}

absl::StatusOr<Tensor> SafetensorsFile::Get(absl::string_view name, const std::vector<int64_t>& shape) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) return absl::NotFoundError(absl::StrCat(path_, " has no tensor ", name));
  const Tensor& tensor = it->second;
  if (tensor.shape != shape) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor ", name, " has the shape [",
                                                   absl::StrJoin(tensor.shape, ", "), "]; the model needs [",
                                                   absl::StrJoin(shape, ", "), "]"));
  }
  if (tensor.type == Tensor::Type::kOther) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor ", name, " must be BF16, F16 or F32"));
  }
  return tensor;
}

}  // namespace millrace
