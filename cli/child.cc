#include "cli/child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace millrace {

LinePipe::~LinePipe() {
  if (fd_ >= 0) close(fd_);
}

void LinePipe::Read(absl::FunctionRef<void(const std::string&)> line) {
  std::array<char, 16 << 10> chunk;
  while (fd_ >= 0) {
    const ssize_t size = read(fd_, chunk.data(), chunk.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0) {
      close(fd_);
      fd_ = -1;
      if (!buffer_.empty()) line(buffer_);
      return;
    }
    for (ssize_t i = 0; i < size; ++i) {
      if (chunk[i] != '\n') buffer_ += chunk[i];
      if (chunk[i] == '\n' || buffer_.size() >= kMaxLine) {
        line(buffer_);
        buffer_.clear();
      }
    }
  }
}

namespace {

// Between fork and exec: async-signal-safe calls alone, since gRPC's threads may have held any lock.
[[noreturn]] void Become(char* const* argv, pid_t parent, int out, int err) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it died before the line above
  setpgid(0, 0);                        // Ctrl-C reaches the parent alone, which ends us in order
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Child>> Child::Start(const std::vector<std::string>& argv) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0) return absl::InternalError(absl::StrCat("pipe: ", std::strerror(errno)));
  if (pipe2(err, O_CLOEXEC) != 0) {
    close(out[0]);
    close(out[1]);
    return absl::InternalError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) Become(words.data(), parent, out[1], err[1]);
  close(out[1]);
  close(err[1]);
  if (pid < 0) {
    close(out[0]);
    close(err[0]);
    return absl::InternalError(absl::StrCat("cannot start ", argv[0], ": ", std::strerror(errno)));
  }
  fcntl(out[0], F_SETFL, O_NONBLOCK);
  fcntl(err[0], F_SETFL, O_NONBLOCK);
  return std::unique_ptr<Child>(new Child(pid, out[0], err[0]));
}

Child::~Child() {
  if (pid_ == 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void Child::Signal(int signal) {
  if (pid_ != 0) kill(pid_, signal);
}

std::optional<std::string> Child::Reap() {
  int status = 0;
  if (pid_ == 0 || waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  pid_ = 0;
  if (WIFSIGNALED(status)) return absl::StrCat("signal ", WTERMSIG(status));
  return absl::StrCat("exit code ", WEXITSTATUS(status));
}

}  // namespace millrace
