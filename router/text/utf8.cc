#include "router/text/utf8.h"

#include <cstring>

namespace millrace {
namespace {

// Number of leading bytes below 0x80, eight at a time.
size_t AsciiPrefix(std::string_view text) {
  size_t at = 0;
  while (at + 8 <= text.size()) {
    uint64_t word;
    std::memcpy(&word, text.data() + at, 8);
    if ((word & 0x8080808080808080u) != 0) break;
    at += 8;
  }
  while (at < text.size() && static_cast<uint8_t>(text[at]) < 0x80) ++at;
  return at;
}

}  // namespace

Utf8Step NextUtf8(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {Utf8Step::Kind::kCharacter, 1, lead};
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Step::Kind::kInvalid, 1, 0};
  // The second byte's range rules out overlong forms, surrogates and everything past U+10FFFF.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  uint32_t code_point = lead & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8Step::Kind::kIncomplete, i, 0};
    if (byte(i) < (i == 1 ? low : 0x80) || byte(i) > (i == 1 ? high : 0xBF)) return {Utf8Step::Kind::kInvalid, i, 0};
    code_point = code_point << 6 | (byte(i) & 0x3F);
  }
  return {Utf8Step::Kind::kCharacter, length, code_point};
}

size_t FirstInvalidUtf8(std::string_view text) {
  size_t at = 0;
  while (true) {
    at += AsciiPrefix(text.substr(at));
    if (at == text.size()) return at;
    const Utf8Step step = NextUtf8(text.substr(at));
    if (step.kind != Utf8Step::Kind::kCharacter) return at;
    at += step.length;
  }
}

void AppendUtf8(uint32_t code_point, std::string& out) {
  const auto tail = [&](int shift) { out.push_back(static_cast<char>(0x80 | (code_point >> shift & 0x3F))); };
  if (code_point < 0x80) {
    out.push_back(static_cast<char>(code_point));
  } else if (code_point < 0x800) {
    out.push_back(static_cast<char>(0xC0 | code_point >> 6));
    tail(0);
  } else if (code_point < 0x10000) {
    out.push_back(static_cast<char>(0xE0 | code_point >> 12));
    tail(6);
    tail(0);
  } else {
    out.push_back(static_cast<char>(0xF0 | code_point >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

size_t AppendLossyUtf8(std::string_view bytes, std::string& out) {
  while (!bytes.empty()) {
    const size_t ascii = AsciiPrefix(bytes);
    out.append(bytes.substr(0, ascii));
    bytes.remove_prefix(ascii);
    if (bytes.empty()) break;
    const Utf8Step step = NextUtf8(bytes);
    if (step.kind == Utf8Step::Kind::kIncomplete) return step.length;
    out.append(step.kind == Utf8Step::Kind::kCharacter ? bytes.substr(0, step.length) : kReplacementCharacter);
    bytes.remove_prefix(step.length);
  }
  return 0;
}

}  // namespace millrace
