#include "cli/interrupt.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>

namespace millrace {

Interrupt::Interrupt() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signals_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  end_ = eventfd(0, EFD_CLOEXEC);
  thread_ = std::thread([this] { Listen(); });
}

Interrupt::~Interrupt() {
  eventfd_write(end_, 1);
  thread_.join();
  close(signals_);
  close(end_);
}

void Interrupt::Watch(grpc::ClientContext* call) {
  absl::MutexLock lock(&mutex_);
  call_ = call;
}

void Interrupt::Listen() {
  std::array<pollfd, 2> fds = {{{signals_, POLLIN, 0}, {end_, POLLIN, 0}}};
  while (true) {
    poll(fds.data(), fds.size(), -1);
    if (fds[1].revents != 0) return;
    signalfd_siginfo info;
    while (read(signals_, &info, sizeof(info)) == sizeof(info)) {
      absl::MutexLock lock(&mutex_);
      if (call_ != nullptr) call_->TryCancel();
    }
  }
}

}  // namespace millrace
