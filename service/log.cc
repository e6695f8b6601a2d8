#include "service/log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/synchronization/mutex.h"
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

// A level's lines in the present second: the second above, their number in the lower 32 bits.
std::atomic<uint64_t> windows[4];
std::atomic<uint64_t> dropped{0};
std::atomic<uint64_t> told{0};  // of those dropped

bool TakeTurn(LogLevel level, uint64_t second) {
  std::atomic<uint64_t>& window = windows[static_cast<int>(level)];
  uint64_t seen = window.load(std::memory_order_relaxed);
  for (;;) {
    const bool same = seen >> 32 == (second & UINT32_MAX);
    if (same && (seen & UINT32_MAX) >= kMaxLogLinesPerSecond) {
      dropped.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    const uint64_t next = same ? seen + 1 : second << 32 | 1;
    if (window.compare_exchange_weak(seen, next, std::memory_order_relaxed)) return true;
  }
}

std::string Prefix(absl::Time now, LogLevel level, absl::string_view event) {
  return absl::StrCat(absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", now, absl::UTCTimeZone()), " ",
                      kNames[static_cast<int>(level)], " ", event);
}

// A log that nobody reads must not stop the service: a pipe that can be written has room for PIPE_BUF bytes. False if
// it cannot.
bool WriteLine(std::string line) {
  if (line.size() >= PIPE_BUF) line.resize(PIPE_BUF - 1);
  line += '\n';
  static absl::Mutex mutex(absl::kConstInit);  // or another thread could take the room
  absl::MutexLock lock(&mutex);
  pollfd out{STDERR_FILENO, POLLOUT, 0};
  if (poll(&out, 1, 0) != 1 || (out.revents & POLLOUT) == 0) return false;
  return write(STDERR_FILENO, line.data(), line.size()) >= 0;
}

void TellDropped(absl::Time now) {
  const uint64_t total = dropped.load(std::memory_order_relaxed);
  uint64_t before = told.load(std::memory_order_relaxed);
  if (before >= total || !told.compare_exchange_strong(before, total, std::memory_order_relaxed)) return;
  const std::string count = absl::StrCat(" count=", total - before);
  if (!WriteLine(Prefix(now, LogLevel::kWarning, "log_lines_dropped") + count)) {
    told.fetch_sub(total - before, std::memory_order_relaxed);
  }
}

}  // namespace

absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view text) {
  for (size_t level = 0; level < std::size(kNames); ++level) {
    if (text == kNames[level]) return static_cast<LogLevel>(level);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("log level is \"", text.substr(0, 32), "\"; the limits are debug, info, warning and error"));
}

uint64_t LogLinesDropped() { return dropped.load(std::memory_order_relaxed); }

void SetLogLevel(LogLevel lowest) { lowest_level.store(lowest, std::memory_order_relaxed); }

bool WouldLog(LogLevel level) { return level >= lowest_level.load(std::memory_order_relaxed); }

void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields) {
  if (!WouldLog(level)) return;
  const absl::Time now = absl::Now();
  if (!TakeTurn(level, static_cast<uint64_t>(absl::ToUnixSeconds(now)))) return;
  TellDropped(now);
  std::string line = Prefix(now, level, event);
  for (const LogField& field : fields) {
    const absl::string_view value = field.value.Piece().substr(0, kMaxValueBytes);
    absl::StrAppend(&line, " ", field.key, "=");
    if (IsPlain(value)) {
      absl::StrAppend(&line, value);
    } else {
      absl::StrAppend(&line, "\"", absl::CHexEscape(value), "\"");
    }
  }
  if (!WriteLine(std::move(line))) dropped.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace millrace
