// Ctrl-C as the end of one call instead of the process. Made before any other thread, so that all inherit the blocked
// SIGINT; lives as long as the command. Thread-safe.
#pragma once

#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/client_context.h"

namespace millrace {

class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // The call that Ctrl-C cancels from now on; nullptr: none, before the context goes away.
  void Watch(grpc::ClientContext* call) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Listen();

  absl::Mutex mutex_;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int signals_, end_;  // signalfd, eventfd
  std::thread thread_;
};

}  // namespace millrace
