#include "worker/model/checkpoint.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/model/json_file.h"

namespace millrace {
namespace {

constexpr int64_t kMaxIndexBytes = 64 << 20;
constexpr size_t kMaxShards = 4096;

bool IsFileName(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::filesystem::path& model_dir) {
  Checkpoint checkpoint;
  checkpoint.model_dir_ = model_dir.string();
  std::error_code error;
  const std::filesystem::path index_path = model_dir / "model.safetensors.index.json";
  if (std::filesystem::exists(model_dir / "model.safetensors", error) || !std::filesystem::exists(index_path, error)) {
    auto file = SafetensorsFile::Open(model_dir / "model.safetensors");
    if (!file.ok()) return file.status();
    for (const auto& [name, tensor] : file->tensors()) checkpoint.shard_of_.emplace(name, 0);
    checkpoint.shards_.push_back(*std::move(file));
    return checkpoint;
  }

  const auto index = ReadJsonFile(index_path, kMaxIndexBytes);
  if (!index.ok()) return index.status();
  if (!index->is_object() || !index->contains("weight_map") || !(*index)["weight_map"].is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(index_path.string(), " has no object weight_map"));
  }
  std::map<std::string, size_t> shard_ids;  // by file name
  for (const auto& [name, shard] : (*index)["weight_map"].items()) {
    if (!shard.is_string() || !IsFileName(shard.get<std::string>())) {
      return absl::InvalidArgumentError(absl::StrCat(index_path.string(), ": tensor ", Quote(name), " is in ",
                                                     Quote(shard), "; it must be a file name, without a folder"));
    }
    const auto [it, is_new] = shard_ids.emplace(shard.get<std::string>(), shard_ids.size());
    if (is_new) {
      if (shard_ids.size() > kMaxShards) {
        return absl::InvalidArgumentError(
            absl::StrCat(index_path.string(), " names more shards than the limit of ", kMaxShards));
      }
      auto file = SafetensorsFile::Open(model_dir / it->first);
      if (!file.ok()) return file.status();
      checkpoint.shards_.push_back(*std::move(file));
    }
    if (!checkpoint.shards_[it->second].tensors().contains(name)) {
      return absl::NotFoundError(
          absl::StrCat(index_path.string(), ": tensor ", Quote(name), " is not in its shard ", it->first));
    }
    checkpoint.shard_of_.emplace(name, it->second);
  }
  return checkpoint;
}

absl::StatusOr<Tensor> Checkpoint::Get(absl::string_view name, const std::vector<int64_t>& shape) const {
  const auto it = shard_of_.find(name);
  if (it == shard_of_.end()) return absl::NotFoundError(absl::StrCat(model_dir_, " has no tensor ", name));
  return shards_[it->second].Get(name, shape);
}

}  // namespace millrace
