// The bytes of every token id, back to back in one buffer: 8 bytes per id plus the text. Ids without bytes (gaps of the
// vocabulary) are empty. Filled while loading, constant afterwards.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace millrace {

class TokenBytes {
 public:
  TokenBytes() = default;
  explicit TokenBytes(const std::vector<std::string>& by_id) {
    offsets_.reserve(by_id.size() + 1);
    for (const std::string& bytes : by_id) {
      buffer_ += bytes;
      offsets_.push_back(buffer_.size());
    }
  }

  int32_t size() const { return static_cast<int32_t>(offsets_.size()) - 1; }
  std::string_view operator[](int32_t id) const {
    if (id < 0 || id >= size()) return {};
    return std::string_view(buffer_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }

 private:
  std::string buffer_;
  std::vector<uint64_t> offsets_ = {0};
};

}  // namespace millrace
