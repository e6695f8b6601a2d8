// The KV pool: bytes addressed by layer and block id, and nothing else; which block holds which tokens is the router's
// knowledge. Taken at start-up, lives as long as the model. The element type A is a property of the pool: float on the
// CPU, where k and v are kept as computed so that results are exact, at twice the bytes of bf16. Memory: num_blocks *
// BlockBytes.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/buffer.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"
#include "worker/model/model_config.h"

namespace millrace {

template <class A>
class KvCache {
 public:
  KvCache() = default;  // a pool of no blocks
  // As many blocks as kv_bytes holds; fewer than one is an error.
  static absl::StatusOr<KvCache> Allocate(const ModelConfig& config, int64_t kv_bytes, Stream& stream);

  static int64_t BlockBytes(const ModelConfig& config);  // all layers, k and v
  int64_t num_blocks() const { return num_blocks_; }
  KvLayer<A> layer(int layer) const;

 private:
  DeviceBuffer memory_;  // [layer][k, v][block]
  int64_t num_blocks_ = 0;
  int num_kv_heads_ = 0;
  int head_dim_ = 0;
};

}  // namespace millrace
