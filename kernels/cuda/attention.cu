// The choice between attention's kernels, and what they share of the workspace. Sequences with many queries are one
// kernel's and the others another's; the host does not know which are which, only where no sequence can have many.
#include <limits>

#include "kernels/check.h"
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

constexpr int kManyQueries = 128;
constexpr int64_t kLeastSlots = 4096;  // of all heads, one row

size_t SlotBytes(int64_t queries, int64_t dim) {
  return static_cast<size_t>(queries) * (static_cast<size_t>(dim) * sizeof(float) + sizeof(float2));
}

}  // namespace

size_t PagedAttentionWorkspaceBytes(int64_t max_context, int num_heads, int head_dim) {
  return static_cast<size_t>(kLeastSlots + DivideUp(max_context, kChunkTokens)) * SlotBytes(num_heads, head_dim);
}

void PagedAttention(Mat<bf16> out, Mat<const bf16> qkv, KvLayer<bf16> kv, const AttentionBatch& batch, float scale,
                    Stream& stream) {
  const int64_t rows = out.rows, sequences = batch.context_len.size;
  if (rows == 0 || sequences == 0) return;
  MILLRACE_CHECK(sequences <= kMaxSequences, "the plan has room for the sequences", sequences);
  MILLRACE_CHECK(kv.head_dim == 16 || kv.head_dim == 32 || kv.head_dim == 48 || kv.head_dim == 64 ||
                     kv.head_dim == 96 || kv.head_dim == 128,
                 "attention has a kernel for the head's size", kv.head_dim);
  const int heads = static_cast<int>(out.cols / kv.head_dim), group = heads / kv.num_kv_heads;
  // Where every sequence has a row, the one with most has at most these; where that is wrong, one kernel serves all.
  const bool many = kv.head_dim % 64 == 0 && (rows - sequences + 1) * group >= kManyQueries;
  const int tile_queries = std::min(rows == sequences ? group : kTileQueries, kTileQueries);
  const int64_t num_slots =
      std::min<int64_t>(static_cast<int64_t>(stream.workspace_bytes() / SlotBytes(tile_queries, kv.head_dim)),
                        std::numeric_limits<int>::max());
  float* const slot_out = reinterpret_cast<float*>(stream.workspace());
  const AttentionArgs args{qkv.data,
                           out.data,
                           kv,
                           batch,
                           heads,
                           group,
                           scale * 1.44269504088896341f,
                           tile_queries,
                           many ? kManyQueries : std::numeric_limits<int>::max(),
                           static_cast<int>(num_slots),
                           slot_out,
                           reinterpret_cast<float2*>(slot_out + num_slots * tile_queries * kv.head_dim),
                           StateOf(stream).counters};
  if (rows == 1 && sequences == 1 && AttendOneSequence(args, stream)) return;
  if (many) AttendManyQueries(args, stream);
  AttendFewQueries(args, stream);
}

}  // namespace millrace::cuda
