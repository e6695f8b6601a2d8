// The calling thread's processor time: bounds in tests must hold on a busy machine too.
#pragma once

#include <ctime>

namespace millrace {

inline double ThreadSeconds() {
  std::timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace millrace
