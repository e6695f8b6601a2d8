#include "worker/model/kv_cache.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace millrace {

template <class A>
int64_t KvCache<A>::BlockBytes(const ModelConfig& config) {
  return int64_t{2} * config.num_layers * config.num_kv_heads * config.head_dim * kBlockTokens * int64_t{sizeof(A)};
}

template <class A>
absl::StatusOr<KvCache<A>> KvCache<A>::Allocate(const ModelConfig& config, int64_t kv_bytes, Stream& stream) {
  const int64_t block_bytes = BlockBytes(config);
  if (kv_bytes < block_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the KV pool has ", kv_bytes, " bytes; one block needs ", block_bytes));
  }
  KvCache cache;
  // A token's place in the pool is an int32.
  cache.num_blocks_ = std::min<int64_t>(kv_bytes / block_bytes, std::numeric_limits<int32_t>::max() / kBlockTokens);
  cache.num_kv_heads_ = config.num_kv_heads;
  cache.head_dim_ = config.head_dim;
  cache.memory_ = DeviceBuffer(static_cast<size_t>(cache.num_blocks_ * block_bytes), stream);
  if (cache.memory_.data() == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a KV pool of ", cache.num_blocks_ * block_bytes, " bytes"));
  }
  return cache;
}

template <class A>
KvLayer<A> KvCache<A>::layer(int layer) const {
  const int64_t size = num_blocks_ * kBlockTokens * num_kv_heads_ * head_dim_;
  const size_t begin = static_cast<size_t>(2 * layer * size) * sizeof(A);
  A* const k = memory_.At<A>(begin, 2 * size);
  return {k, k + size, num_blocks_, num_kv_heads_, head_dim_};
}

template class KvCache<float>;
template class KvCache<bf16>;

}  // namespace millrace
