// Structured logging: one event, one line on stderr, `time level event key=value …`. Values with spaces, quotes or
// control characters are quoted and escaped. Any thread; a line is one write. Prompts and outputs never belong in it.
#pragma once

#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace millrace {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

struct LogField {
  absl::string_view key;
  const absl::AlphaNum& value;
};

void SetLogLevel(LogLevel lowest);  // default kInfo
void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields = {});

}  // namespace millrace
