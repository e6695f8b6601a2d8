// MILLRACE_CHECK(condition, "invariant", values…): an always-on check of our own invariants. It prints the invariant
// and the values and aborts. Input from outside is never checked this way; it gets a Status.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

namespace millrace {

[[noreturn]] inline void CheckFailed(const char* file, int line, const char* condition, const char* invariant,
                                     std::initializer_list<long long> values) {
  std::fprintf(stderr, "%s:%d: broken invariant: %s (%s)", file, line, invariant, condition);
  for (const long long value : values) std::fprintf(stderr, " %lld", value);
  std::fputc('\n', stderr);
  std::abort();
}

}  // namespace millrace

#define MILLRACE_CHECK(condition, invariant, ...)                                                        \
  do {                                                                                                   \
    if (!(condition)) ::millrace::CheckFailed(__FILE__, __LINE__, #condition, invariant, {__VA_ARGS__}); \
  } while (false)
