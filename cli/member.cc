#include "cli/member.h"

#include <algorithm>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace millrace {
namespace {

constexpr absl::Duration kFirstBackOff = absl::Milliseconds(500), kLongestBackOff = absl::Seconds(30);
constexpr absl::Duration kStable = absl::Minutes(1);  // having run for so long, it starts again at once
constexpr size_t kLastLines = 20;
constexpr char kReady[] = "ready ";

}  // namespace

Member::Member(std::string name, std::vector<std::string> argv, std::string log_dir, std::ostream& err)
    : name_(std::move(name)), argv_(std::move(argv)), err_(err), back_off_(kFirstBackOff) {
  if (log_dir.empty()) return;
  log_.open(std::filesystem::path(log_dir) / (name_ + ".log"), std::ios::app);
  log_open_ = log_.is_open();
  if (!log_open_)
    err_ << "millrace: cannot write " << name_ << ".log in " << log_dir << "; its output comes here" << std::endl;
}

absl::Status Member::Start() {
  absl::StatusOr<std::unique_ptr<Child>> child = Child::Start(argv_);
  if (!child.ok()) return child.status();
  child_ = *std::move(child);
  ready_ = false;
  last_lines_.clear();
  started_at_ = absl::Now();
  restart_at_ = absl::InfiniteFuture();
  return absl::OkStatus();
}

absl::Status Member::Restart() {
  for (std::string& word : argv_) {
    if (absl::StartsWith(word, "--listen=")) word = absl::StrCat("--listen=", address_);
  }
  return Start();
}

bool Member::Poll(absl::Time now) {
  if (child_ == nullptr) return false;
  const std::optional<std::string> end = child_->Reap();  // before reading: then the pipes hold all that will come
  child_->err().Read([this](const std::string& line) { Log(line); });
  child_->out().Read([this](const std::string& line) {
    if (!absl::StartsWith(line, kReady)) return Log(line);
    address_ = line.substr(sizeof(kReady) - 1);
    ready_ = true;
  });
  if (!end.has_value()) return false;
  end_ = *end;
  child_.reset();
  if (now - started_at_ > kStable) back_off_ = kFirstBackOff;
  restart_at_ = now + back_off_;
  back_off_ = std::min(2 * back_off_, kLongestBackOff);
  return true;
}

std::string Member::LastWords() const {
  return log_open_ && !last_lines_.empty() ? absl::StrCat("\n", absl::StrJoin(last_lines_, "\n")) : "";
}

void Member::Log(const std::string& line) {
  last_lines_.push_back(line);
  if (last_lines_.size() > kLastLines) last_lines_.pop_front();
  if (log_open_) {
    log_ << line << std::endl;
  } else {
    err_ << "[" << name_ << "] " << line << std::endl;
  }
}

}  // namespace millrace
