// The Generate calls that are open, by request id: their owner, from before they are submitted until gRPC is done with
// them. Bounded by `max_calls`. Any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace millrace {

class GenerateCall;

class CallRegistry {
 public:
  explicit CallRegistry(size_t max_calls) : max_calls_(max_calls) {}

  // RESOURCE_EXHAUSTED when full, ALREADY_EXISTS for an id that is in use. The fleet is the call's other owner, as long
  // as a sequence of it lives.
  absl::Status Add(const std::string& request_id, std::shared_ptr<GenerateCall> call);
  absl::Status CheckRoom() const;
  std::shared_ptr<GenerateCall> Find(const std::string& request_id) const;  // null: no such call
  void Remove(const std::string& request_id);
  size_t size() const;

 private:
  absl::Status CheckRoomLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const size_t max_calls_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<GenerateCall>> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace millrace
