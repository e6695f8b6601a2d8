// Where the events of a request's sequences go: one per client call, implemented by the api.
#pragma once

#include <optional>
#include <string>

#include "router/schedule/scheduler.h"

namespace millrace {

// What became of a sequence that has ended.
struct SequenceOutcome {
  SequenceReport report;
  std::string worker_id;  // of the last worker; empty if that one is gone
};

struct SequenceUpdate {
  int choice = 0;  // index of the sequence's spec among those submitted together
  SequenceEvent event;
  std::optional<SequenceOutcome> outcome;  // set with event.finished
};

class SequenceSink {
 public:
  virtual ~SequenceSink() = default;
  // Called under the fleet's lock, in the order of events: stores the update and returns. Must not call the fleet.
  virtual void Push(SequenceUpdate update) = 0;
  // Called after one or more pushes, without any lock, perhaps by several threads at once: works on what was pushed.
  virtual void Wake() = 0;
};

}  // namespace millrace
