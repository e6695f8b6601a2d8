#include "router/text/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "router/text/utf8.h"

namespace millrace {

bool IsWhiteSpace(uint32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool IsWordCharacter(uint32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return c == 0x200C || c == 0x200D;
  }
}

std::string NormalizeNfc(std::string_view text) {
  constexpr uint32_t kFirstCombining = 0x300;  // below, every character is its own form C
  std::vector<utf8proc_int32_t> decomposed;
  decomposed.reserve(text.size());
  bool unchanged = true;
  for (std::string_view rest = text; !rest.empty();) {
    const Utf8Step step = NextUtf8(rest);
    rest.remove_prefix(step.length);
    unchanged = unchanged && step.code_point < kFirstCombining;
    utf8proc_int32_t parts[8];
    int boundary = 0;
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.code_point), parts, 8,
                                               UTF8PROC_DECOMPOSE, &boundary);
    if (count > 0 && count <= 8) {
      decomposed.insert(decomposed.end(), parts, parts + count);
    } else {
      decomposed.push_back(static_cast<utf8proc_int32_t>(step.code_point));
    }
  }
  if (unchanged) return std::string(text);
  // utf8proc's own reordering is quadratic in the length of a run of marks.
  const auto order = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  for (auto it = decomposed.begin(); it != decomposed.end();) {
    it = std::find_if(it, decomposed.end(), [&](auto c) { return order(c) != 0; });
    const auto end = std::find_if(it, decomposed.end(), [&](auto c) { return order(c) == 0; });
    std::stable_sort(it, end, [&](auto a, auto b) { return order(a) < order(b); });
    it = end;
  }
  const auto length = utf8proc_normalize_utf32(decomposed.data(), static_cast<utf8proc_ssize_t>(decomposed.size()),
                                               static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  std::string out;
  out.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < length; ++i) AppendUtf8(static_cast<uint32_t>(decomposed[i]), out);
  return out;
}

}  // namespace millrace
