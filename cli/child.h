// One child process in a group of its own, whose stdout and stderr come to us through pipes. It dies with us, even by
// SIGKILL; Start and everything else belong to the main thread (the kernel ties the child's death to the thread that
// started it). Destroying a running child kills it.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace millrace {

// Bytes of a pipe, cut into lines. Does not block.
class LinePipe {
 public:
  static constexpr size_t kMaxLine = 64 << 10;  // longer ones are cut

  explicit LinePipe(int fd) : fd_(fd) {}
  ~LinePipe();
  LinePipe(const LinePipe&) = delete;
  LinePipe& operator=(const LinePipe&) = delete;

  // Gives every whole line that has come (at the end also the unfinished one).
  void Read(absl::FunctionRef<void(const std::string&)> line);
  int fd() const { return fd_; }  // -1 after the end

 private:
  int fd_;
  std::string buffer_;
};

class Child {
 public:
  static absl::StatusOr<std::unique_ptr<Child>> Start(const std::vector<std::string>& argv);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void Signal(int signal);
  pid_t pid() const { return pid_; }  // 0 once reaped
  // How it ended ("exit code 1", "signal 9"), once it has.
  std::optional<std::string> Reap();

  LinePipe& out() { return out_; }
  LinePipe& err() { return err_; }

 private:
  Child(pid_t pid, int out, int err) : pid_(pid), out_(out), err_(err) {}

  pid_t pid_;  // 0 once reaped
  LinePipe out_, err_;
};

}  // namespace millrace
