// Asks for the addresses behind the names of services, again every few seconds, on a thread of its own since asking may
// block. Lives as long as the fleet runs; the destructor waits for a question under way.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "service/address.h"

namespace millrace {

class Resolver {
 public:
  using Lookup = std::function<absl::StatusOr<std::vector<std::string>>(const Address& service)>;
  // Called on the resolver's thread with HOST:PORT of each, sorted and distinct.
  using Found = std::function<void(const Address& service, std::vector<std::string> addresses)>;

  // A question without an answer changes nothing: a name server that is down has not taken the workers with it.
  Resolver(std::vector<Address> services, absl::Duration period, Lookup lookup, Found found);
  ~Resolver();

 private:
  void Run();

  const std::vector<Address> services_;
  const absl::Duration period_;
  const Lookup lookup_;
  const Found found_;

  absl::Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses everything above
};

// By the system's resolver. UNAVAILABLE if it has no answer.
absl::StatusOr<std::vector<std::string>> LookUpHost(const Address& service);

}  // namespace millrace
