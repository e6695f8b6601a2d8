#include "router/fleet/clock.h"

#include <sys/random.h>

#include "kernels/check.h"

namespace millrace {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;

constexpr std::chrono::hours kFarAway{24 * 365};

}  // namespace

Time MonotonicNow() { return duration_cast<microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Time FromSystemTime(std::chrono::system_clock::time_point when) {
  const auto now = std::chrono::system_clock::now();
  if (when > now + kFarAway) return kNever;
  if (when <= now) return MonotonicNow();
  return MonotonicNow() + duration_cast<microseconds>(when - now).count();
}

uint64_t UnixMicros() {
  return static_cast<uint64_t>(
      duration_cast<microseconds>(std::chrono::system_clock::now().time_since_epoch()).count());
}

uint64_t RandomBits() {
  uint64_t bits = 0;
  MILLRACE_CHECK(getrandom(&bits, sizeof bits, 0) == sizeof bits, "the kernel gives eight random bytes");
  return bits;
}

}  // namespace millrace
