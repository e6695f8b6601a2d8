// Where a request stands in a trace, as the W3C's Trace Context says it in `traceparent`. A value; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace millrace {

struct TraceContext {
  uint64_t trace_high = 0, trace_low = 0;  // 128 bits, never all zero
  uint64_t span_id = 0;                    // of the span that called, never zero
  bool sampled = false;                    // somebody records the trace
};

// Nothing if it is not well-formed: then it is as if it were not there. A version to come is read as far as this one.
std::optional<TraceContext> ParseTraceparent(absl::string_view text);
std::string FormatTraceparent(const TraceContext& context);  // kTraceparentBytes
inline constexpr size_t kTraceparentBytes = 55;

}  // namespace millrace
