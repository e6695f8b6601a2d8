// The router's one clock and its one source of randomness; the scheduler gets both as arguments. Stateless; any thread.
#pragma once

#include <chrono>
#include <cstdint>

#include "router/schedule/scheduler.h"

namespace millrace {

Time MonotonicNow();
// The same moment on the monotonic clock; kNever for a time too far away to be meant.
Time FromSystemTime(std::chrono::system_clock::time_point when);
uint64_t UnixMicros();

uint64_t RandomBits();  // from the kernel

}  // namespace millrace
