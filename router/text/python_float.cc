#include "router/text/python_float.h"

#include <charconv>
#include <cmath>

namespace millrace {

std::string PythonFloat(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  if (value == 0) return std::signbit(value) ? "-0.0" : "0.0";
  const int exponent = [&] {
    char text[40];
    const auto end = std::to_chars(text, text + sizeof(text), value, std::chars_format::scientific).ptr;
    const std::string scientific(text, end);
    return std::stoi(scientific.substr(scientific.find('e') + 1));
  }();
  const bool fixed = exponent >= -4 && exponent < 16;
  char text[400];
  const auto end =
      std::to_chars(text, text + sizeof(text), value, fixed ? std::chars_format::fixed : std::chars_format::scientific)
          .ptr;
  std::string out(text, end);
  if (fixed && out.find('.') == std::string::npos) out += ".0";
  return out;
}

}  // namespace millrace
