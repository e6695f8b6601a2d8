#include "service/trace_context.h"

#include "absl/strings/str_cat.h"

namespace millrace {
namespace {

// The next `digits` of lower-case hexadecimal.
std::optional<uint64_t> TakeHex(absl::string_view* text, size_t digits) {
  uint64_t value = 0;
  for (const char c : text->substr(0, digits)) {
    if (!(c >= '0' && c <= '9') && !(c >= 'a' && c <= 'f')) return std::nullopt;
    value = value << 4 | static_cast<uint64_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  text->remove_prefix(digits);
  return value;
}

bool TakeDash(absl::string_view* text) {
  if (text->front() != '-') return false;
  text->remove_prefix(1);
  return true;
}

}  // namespace

// VERSION-TRACE_ID-SPAN_ID-FLAGS: 2, 32, 16 and 2 digits.
std::optional<TraceContext> ParseTraceparent(absl::string_view text) {
  if (text.size() < kTraceparentBytes) return std::nullopt;
  const std::optional<uint64_t> version = TakeHex(&text, 2);
  if (!version.has_value() || *version == 0xff || !TakeDash(&text)) return std::nullopt;
  const std::optional<uint64_t> high = TakeHex(&text, 16), low = TakeHex(&text, 16);
  if (!high.has_value() || !low.has_value() || (*high | *low) == 0 || !TakeDash(&text)) return std::nullopt;
  const std::optional<uint64_t> span = TakeHex(&text, 16);
  if (!span.has_value() || *span == 0 || !TakeDash(&text)) return std::nullopt;
  const std::optional<uint64_t> flags = TakeHex(&text, 2);
  if (!flags.has_value()) return std::nullopt;
  if (!text.empty() && (*version == 0 || text.front() != '-')) return std::nullopt;
  return TraceContext{*high, *low, *span, (*flags & 1) != 0};
}

std::string FormatTraceparent(const TraceContext& context) {
  return absl::StrCat("00-", absl::Hex(context.trace_high, absl::kZeroPad16),
                      absl::Hex(context.trace_low, absl::kZeroPad16), "-", absl::Hex(context.span_id, absl::kZeroPad16),
                      context.sampled ? "-01" : "-00");
}

}  // namespace millrace
