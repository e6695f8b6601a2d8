// The contents that workers died of, for kQuarantine each, so that sending one again at once does no harm. A value;
// single-threaded; times are arguments. At most kMaxContents, the oldest goes first: 32 bytes each; O(contents) a call.
#pragma once

#include <cstddef>
#include <deque>

#include "router/schedule/prefix_hash.h"
#include "router/schedule/scheduler.h"

namespace millrace {

class QuarantinedContents {
 public:
  // Long enough for a client's retries to give up, and for a worker to be repaired without anybody's help.
  static constexpr Time kQuarantine = 300'000'000;
  // Each has cost two workers: more of them in five minutes are another kind of trouble.
  static constexpr size_t kMaxContents = 1024;

  bool empty() const { return contents_.empty(); }
  void Add(const PrefixHash& content, Time now);
  // Until when it is refused; 0: it is not.
  Time Until(const PrefixHash& content, Time now);

 private:
  struct Content {
    PrefixHash hash;
    Time until;
  };
  std::deque<Content> contents_;  // by `until`
};

}  // namespace millrace
