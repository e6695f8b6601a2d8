// Finds ids by 64-bit hashes: open addressing with 8 bytes a slot, an id and the upper 36 bits of its hash. Several ids
// may answer to one hash; the caller proves which is meant. Single-threaded. Time: O(1); growing O(size), so Reserve.
// Memory: 8 bytes per 0.6 entries reserved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace millrace {

class EntryTable {
 public:
  static constexpr uint32_t kMaxId = (1u << 28) - 2;

  // Makes room for so many without growing.
  void Reserve(size_t entries);
  size_t size() const { return size_; }

  void Prefetch(uint64_t hash) const {
    if (!slots_.empty()) __builtin_prefetch(&slots_[Home(hash >> kIdBits)]);
  }

  // The first id for which `accept` holds, of those that answer to the hash; `none` if there is no such.
  template <class Accept>
  uint32_t Find(uint64_t hash, uint32_t none, const Accept& accept) const {
    if (slots_.empty()) return none;
    const uint64_t fingerprint = hash >> kIdBits;
    for (size_t i = Home(fingerprint); slots_[i] != 0; i = Next(i)) {
      if (slots_[i] >> kIdBits != fingerprint) continue;
      const auto id = static_cast<uint32_t>(slots_[i] & kIdMask) - 1;
      if (accept(id)) return id;
    }
    return none;
  }

  void Insert(uint64_t hash, uint32_t id);  // id <= kMaxId
  void Erase(uint64_t hash, uint32_t id);   // REQUIRES: inserted with this hash

 private:
  static constexpr int kIdBits = 28;
  static constexpr uint64_t kIdMask = (1u << kIdBits) - 1;

  // Order of slots is order of hashes, whatever the size: no power of two is needed.
  size_t Home(uint64_t fingerprint) const { return (fingerprint * slots_.size()) >> (64 - kIdBits); }
  size_t Next(size_t i) const { return i + 1 == slots_.size() ? 0 : i + 1; }
  void Grow(size_t num_slots);

  std::vector<uint64_t> slots_;  // upper bits of the hash, id + 1; 0: empty
  size_t size_ = 0;
};

}  // namespace millrace
