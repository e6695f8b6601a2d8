// A hash map keyed by byte strings that looks up views without copying. (The installed Abseil has a string_view of its
// own.)
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "absl/container/flat_hash_map.h"

namespace millrace {

struct BytesHash {
  using is_transparent = void;
  size_t operator()(std::string_view bytes) const { return std::hash<std::string_view>()(bytes); }
};

template <typename Value>
using BytesMap = absl::flat_hash_map<std::string, Value, BytesHash, std::equal_to<>>;

}  // namespace millrace
