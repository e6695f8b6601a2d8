// Lines that are finished in any order and written in the order in which they were reserved, each flushed. Thread-safe;
// must outlive every reserved line.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <ostream>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace millrace {

class OrderedLines {
 public:
  // At most `concurrency` lines are unfinished at a time, and 16 times as many unwritten.
  OrderedLines(std::ostream& out, size_t concurrency) : out_(out), concurrency_(concurrency) {}

  // Blocks while too many are open. Returns the line's number.
  uint64_t Reserve() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &OrderedLines::HasRoom));
    ++unfinished_;
    lines_.emplace_back();
    return first_ + lines_.size() - 1;
  }

  void Finish(uint64_t number, std::string line) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    --unfinished_;
    lines_[number - first_] = std::move(line);
    for (; !lines_.empty() && lines_.front().has_value(); lines_.pop_front(), ++first_) {
      out_ << *lines_.front() << '\n' << std::flush;
    }
  }

  void WaitForAll() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &OrderedLines::IsEmpty));
  }

 private:
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return unfinished_ < concurrency_ && lines_.size() < 16 * concurrency_;
  }
  bool IsEmpty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return lines_.empty(); }

  absl::Mutex mutex_;
  std::ostream& out_ ABSL_GUARDED_BY(mutex_);
  const size_t concurrency_;
  std::deque<std::optional<std::string>> lines_ ABSL_GUARDED_BY(mutex_);
  uint64_t first_ ABSL_GUARDED_BY(mutex_) = 0;  // number of lines_.front()
  size_t unfinished_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace millrace
