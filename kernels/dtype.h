// Element types. bf16 is a storage type that exists without CUDA: it converts exactly to float and rounds to nearest
// even back.
#pragma once

#include <bit>
#include <cstdint>

namespace millrace {

struct bf16 {
  uint16_t bits;

  bf16() = default;
  explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = static_cast<uint16_t>(is_nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
static_assert(sizeof(bf16) == 2);

}  // namespace millrace
