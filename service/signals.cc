#include "service/signals.h"

#include <pthread.h>
#include <signal.h>

namespace millrace {
namespace {

sigset_t ShutdownSet() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

ShutdownSignals::ShutdownSignals() {
  const sigset_t set = ShutdownSet();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

int ShutdownSignals::Wait() {
  const sigset_t set = ShutdownSet();
  int number = 0;
  while (sigwait(&set, &number) != 0) {
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  return number;
}

}  // namespace millrace
