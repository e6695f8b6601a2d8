// The tensors of a model folder: model.safetensors, or shards named by model.safetensors.index.json. Lives while
// weights are loaded; every tensor it gives is a view into it. Memory: the maps, and one entry per tensor.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/model/safetensors.h"

namespace millrace {

class Checkpoint {
 public:
  static absl::StatusOr<Checkpoint> Open(const std::filesystem::path& model_dir);

  // The tensor, proven to be readable and of this shape.
  absl::StatusOr<Tensor> Get(absl::string_view name, const std::vector<int64_t>& shape) const;

 private:
  Checkpoint() = default;

  std::string model_dir_;
  std::vector<SafetensorsFile> shards_;
  std::map<std::string, size_t, std::less<>> shard_of_;  // by tensor name
};

}  // namespace millrace
