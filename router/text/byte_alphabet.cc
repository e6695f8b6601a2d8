#include "router/text/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "router/text/utf8.h"

namespace millrace {
namespace {

constexpr int kSymbols = 256 + 68;

// Code point → byte, -1 where the alphabet has no such character.
constexpr std::array<int16_t, kSymbols> MakeAlphabet() {
  std::array<int16_t, kSymbols> byte_of = {};
  for (auto& entry : byte_of) entry = -1;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool as_itself = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    byte_of[as_itself ? byte : next++] = static_cast<int16_t>(byte);
  }
  return byte_of;
}
constexpr std::array<int16_t, kSymbols> kByteOf = MakeAlphabet();

}  // namespace

std::optional<std::string> BytesFromSymbols(std::string_view symbols) {
  std::string bytes;
  bytes.reserve(symbols.size());
  while (!symbols.empty()) {
    const Utf8Step step = NextUtf8(symbols);
    if (step.kind != Utf8Step::Kind::kCharacter || step.code_point >= kSymbols || kByteOf[step.code_point] < 0) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(kByteOf[step.code_point]));
    symbols.remove_prefix(step.length);
  }
  return bytes;
}

}  // namespace millrace
