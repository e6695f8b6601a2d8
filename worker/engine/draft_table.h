// What a model usually says next, counted beforehand (deploy/draft_table.py): after one to four tokens the likeliest
// one, and how likely. The longest known context speaks: stupid backoff (Brants et al., 2007) without its weights,
// since only the likeliest counts. Immutable after Load; any thread.
//
// The file, little-endian: "MRDRAFT1", the vocabulary's size and the number of entries (4 bytes each), then entries of
// 8 bytes, an open-addressed table: the low half of the context's hash; token | likelihood << 24, a likelihood in units
// of 1 / 255, 0 where the entry is free. An entry lies at or after hash * entries >> 64, around the end, before the
// first free one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/tensor.h"

namespace millrace {

class DraftTable {
 public:
  static constexpr const char* kFileName = "draft.ngrams";  // in a model's folder
  static constexpr size_t kMaxContext = 4;
  static constexpr double kLeastLikely = 0.15;  // of a draft's tokens together

  // Null where there is no such file. DATA_LOSS, with the reason, where it is another thing or of another vocabulary.
  static absl::StatusOr<std::shared_ptr<const DraftTable>> Load(const std::filesystem::path& path, int64_t vocab_size);

  // At most `max_count` tokens that are likely to follow all of `tokens`, as many as together are likely enough.
  std::vector<int32_t> Draft(Vec<const int32_t> tokens, int32_t max_count) const;

  size_t num_entries() const { return entries_.size(); }  // free ones too

 private:
  struct Entry {
    uint32_t check = 0;
    uint32_t token_and_likelihood = 0;
    int32_t token() const { return static_cast<int32_t>(token_and_likelihood & 0xffffff); }
    uint32_t likelihood() const { return token_and_likelihood >> 24; }
  };
  static_assert(sizeof(Entry) == 8);

  explicit DraftTable(std::vector<Entry> entries) : entries_(std::move(entries)) {}
  const Entry* Find(const int32_t* context, size_t size) const;

  std::vector<Entry> entries_;  // at least one is free
};

}  // namespace millrace
