// grpc.health.v1: what probes and load balancers ask. Holds statuses that others set, and reads nothing else, so an
// answer never waits for the work. Any thread; lives as long as its server. Bounded: 1,024 watchers, two fields each.
#pragma once

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace millrace {

class HealthService final : public grpc::health::v1::Health::CallbackService {
 public:
  static constexpr size_t kMaxWatchers = 1024;
  static constexpr size_t kMaxNameBytes = 256;

  HealthService();  // the process, "", is SERVING

  void SetServing(const std::string& service, bool serving);
  // Everything is NOT_SERVING from here on, and every Watch ends once it has said so.
  void Shutdown();
  // What Check answers. NOT_FOUND for a service that is not known.
  grpc::Status Answer(const std::string& service, grpc::health::v1::HealthCheckResponse* response) const;

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context,
                                  const grpc::health::v1::HealthCheckRequest* request,
                                  grpc::health::v1::HealthCheckResponse* response) override;
  grpc::ServerWriteReactor<grpc::health::v1::HealthCheckResponse>* Watch(
      grpc::CallbackServerContext* context, const grpc::health::v1::HealthCheckRequest* request) override;

 private:
  class Watcher;
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;

  Status StatusOf(const std::string& service) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;  // of the watchers too
  absl::flat_hash_map<std::string, bool> serving_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<Watcher*> watchers_ ABSL_GUARDED_BY(mutex_);
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace millrace
