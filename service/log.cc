#include "service/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace millrace {
namespace {

std::atomic<LogLevel> lowest_level{LogLevel::kInfo};

constexpr absl::string_view kNames[] = {"debug", "info", "warning", "error"};
constexpr size_t kMaxValueBytes = 512;

bool IsPlain(absl::string_view value) {
  return !value.empty() && std::all_of(value.begin(), value.end(), [](unsigned char c) {
    return c > 0x20 && c < 0x7f && c != '"' && c != '\\' && c != '=';
  });
}

}  // namespace

void SetLogLevel(LogLevel lowest) { lowest_level.store(lowest, std::memory_order_relaxed); }

void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields) {
  if (level < lowest_level.load(std::memory_order_relaxed)) return;
  std::string line = absl::StrCat(absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(), absl::UTCTimeZone()), " ",
                                  kNames[static_cast<int>(level)], " ", event);
  for (const LogField& field : fields) {
    const absl::string_view value = field.value.Piece().substr(0, kMaxValueBytes);
    absl::StrAppend(&line, " ", field.key, "=");
    if (IsPlain(value)) {
      absl::StrAppend(&line, value);
    } else {
      absl::StrAppend(&line, "\"", absl::CHexEscape(value), "\"");
    }
  }
  line += '\n';
  // A log that cannot be written must not stop the service.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace millrace
