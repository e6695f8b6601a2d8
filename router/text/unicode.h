// Unicode data: character classes and normalisation form C, through utf8proc (the only place that sees it). Stateless;
// any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace millrace {

bool IsWhiteSpace(uint32_t code_point);     // the property White_Space
bool IsWordCharacter(uint32_t code_point);  // \w of Unicode regular expressions

// Form C of valid UTF-8. Linear but for a sort within each run of combining marks.
std::string NormalizeNfc(std::string_view text);

}  // namespace millrace
