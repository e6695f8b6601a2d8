// UTF-8 as this folder needs it: strict validation (no surrogates, no overlong forms, nothing past U+10FFFF) and the
// replacement of broken bytes, one U+FFFD for each maximal invalid part. Stateless; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace millrace {

// What stands at the start of a text.
struct Utf8Step {
  enum class Kind { kCharacter, kInvalid, kIncomplete };
  Kind kind;
  size_t length;  // bytes of the character, of the maximal invalid part, or of the unfinished character at the end
  uint32_t code_point;  // valid for kCharacter only
};
Utf8Step NextUtf8(std::string_view text);  // `text` is not empty

// Offset of the first byte that is not part of a character; text.size() when all is well.
size_t FirstInvalidUtf8(std::string_view text);

void AppendUtf8(uint32_t code_point, std::string& out);

// Appends the characters of `bytes` to `out`, U+FFFD for each maximal invalid part. An unfinished character at the end
// is left out and its length returned, so that the caller may wait for the rest.
size_t AppendLossyUtf8(std::string_view bytes, std::string& out);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

}  // namespace millrace
