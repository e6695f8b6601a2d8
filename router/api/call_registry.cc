#include "router/api/call_registry.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "router/api/generate_call.h"

namespace millrace {

absl::Status CallRegistry::Add(const std::string& request_id, std::shared_ptr<GenerateCall> call) {
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = CheckRoomLocked(); !status.ok()) return status;
  if (calls_.try_emplace(request_id, std::move(call)).second) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat("request_id is \"", request_id, "\"; a request with this id is running"));
}

absl::Status CallRegistry::CheckRoom() const {
  absl::MutexLock lock(&mutex_);
  return CheckRoomLocked();
}

absl::Status CallRegistry::CheckRoomLocked() const {
  if (calls_.size() < max_calls_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(calls_.size(), " calls are open; the limit is ", max_calls_));
}

std::shared_ptr<GenerateCall> CallRegistry::Find(const std::string& request_id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = calls_.find(request_id);
  return found == calls_.end() ? nullptr : found->second;
}

void CallRegistry::Remove(const std::string& request_id) {
  std::shared_ptr<GenerateCall> call;  // ends, if this was its last owner, without the lock
  absl::MutexLock lock(&mutex_);
  const auto found = calls_.find(request_id);
  if (found == calls_.end()) return;
  call = std::move(found->second);
  calls_.erase(found);
}

size_t CallRegistry::size() const {
  absl::MutexLock lock(&mutex_);
  return calls_.size();
}

}  // namespace millrace
