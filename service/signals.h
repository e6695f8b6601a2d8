// Turns SIGTERM and SIGINT into a call that returns. Made first thing in main, before any thread exists, so that all
// threads inherit the blocked mask; lives as long as main. SIGPIPE is ignored: a peer that is gone is an error of its
// write.
#pragma once

namespace millrace {

class ShutdownSignals {
 public:
  ShutdownSignals();
  // Returns the signal that arrived. Afterwards both have their default effect again: a second one ends the process at
  // once.
  int Wait();
};

}  // namespace millrace
