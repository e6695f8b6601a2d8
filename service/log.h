// Structured logging: one event, one line on stderr, `time level event key=value …`. Values with spaces, quotes or
// control characters are quoted and escaped. Any thread; a line is one write. Prompts and outputs never belong in it.
// Of each level at most kMaxLogLinesPerSecond are written, and none that would wait for a reader of stderr; how many
// were not is said by the next line that is. A line has at most 4,096 bytes.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace millrace {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

struct LogField {
  absl::string_view key;
  const absl::AlphaNum& value;
};

inline constexpr uint32_t kMaxLogLinesPerSecond = 1000;

void SetLogLevel(LogLevel lowest);  // default kInfo
// "debug", "info", "warning" or "error"; INVALID_ARGUMENT otherwise.
absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view text);
bool WouldLog(LogLevel level);  // for those to whom a line costs something before Log
void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields = {});
uint64_t LogLinesDropped();  // since the process started

}  // namespace millrace
