// One process of the cluster that `millrace up` runs: how it is started, its current child, its log and its restarts.
// Lives as long as the command, on the main thread.
#pragma once

#include <deque>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/child.h"

namespace millrace {

class Member {
 public:
  // Its output goes to DIR/NAME.log, or prefixed to `err` where `log_dir` is empty.
  Member(std::string name, std::vector<std::string> argv, std::string log_dir, std::ostream& err);

  absl::Status Start();
  // Takes what its pipes hold and notices its end. True when it has ended just now.
  bool Poll(absl::Time now);
  // Forgets how it ended; the next start takes the address that it had, so that the router finds it again.
  absl::Status Restart();

  bool running() const { return child_ != nullptr; }
  bool ready() const { return running() && ready_; }
  bool ever_ready() const { return !address_.empty(); }
  const std::string& name() const { return name_; }
  const std::string& address() const { return address_; }  // of its `ready HOST:PORT` line
  const std::string& end() const { return end_; }          // how the last child ended
  absl::Time restart_at() const { return restart_at_; }
  std::string LastWords() const;  // the end of its log, where the user has not seen it
  Child* child() { return child_.get(); }

 private:
  void Log(const std::string& line);

  const std::string name_;
  std::vector<std::string> argv_;
  std::ostream& err_;
  std::ofstream log_;
  bool log_open_ = false;
  std::deque<std::string> last_lines_;  // of the current child
  std::unique_ptr<Child> child_;
  bool ready_ = false;
  std::string address_, end_;
  absl::Duration back_off_;
  absl::Time started_at_, restart_at_ = absl::InfiniteFuture();
};

}  // namespace millrace
