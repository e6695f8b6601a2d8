#include "service/health_service.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace millrace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// One Watch call. Deletes itself when gRPC is done with it.
class HealthService::Watcher final : public grpc::ServerWriteReactor<HealthCheckResponse> {
 public:
  Watcher(HealthService* health, std::string service) : health_(health), service_(std::move(service)) {
    absl::MutexLock lock(&health_->mutex_);
    if (health_->watchers_.size() >= kMaxWatchers) {
      End({grpc::StatusCode::RESOURCE_EXHAUSTED, absl::StrCat(kMaxWatchers, " health watches are open, the limit")});
      return;
    }
    health_->watchers_.insert(this);
    GoOn();
  }

  // Writes what the client does not know yet; ends with the service.
  void GoOn() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    health_->mutex_.AssertHeld();
    if (writing_ || ended_) return;
    const Status status = health_->StatusOf(service_);
    if (status != message_.status()) {
      message_.set_status(status);
      writing_ = true;
      StartWrite(&message_);
    } else if (health_->shut_down_) {
      End(grpc::Status::OK);
    }
  }

 private:
  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&health_->mutex_);
    writing_ = false;
    if (!ok) End(grpc::Status::CANCELLED);
    GoOn();
  }
  void OnCancel() override {
    absl::MutexLock lock(&health_->mutex_);
    End(grpc::Status::CANCELLED);
  }
  void OnDone() override {
    {
      absl::MutexLock lock(&health_->mutex_);
      health_->watchers_.erase(this);
    }
    delete this;
  }
  void End(const grpc::Status& status) {
    if (std::exchange(ended_, true)) return;
    Finish(status);
  }

  HealthService* const health_;
  const std::string service_;
  HealthCheckResponse message_;  // the latest written; UNKNOWN at first, which no service is
  bool writing_ = false;
  bool ended_ = false;
};

HealthService::HealthService() { serving_[""] = true; }

HealthService::Status HealthService::StatusOf(const std::string& service) const {
  const auto found = serving_.find(service);
  if (found == serving_.end()) return HealthCheckResponse::SERVICE_UNKNOWN;
  return found->second && !shut_down_ ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

void HealthService::SetServing(const std::string& service, bool serving) {
  absl::MutexLock lock(&mutex_);
  const auto [entry, is_new] = serving_.try_emplace(service, serving);
  if (!is_new && std::exchange(entry->second, serving) == serving) return;
  for (Watcher* watcher : watchers_) watcher->GoOn();
}

void HealthService::Shutdown() {
  absl::MutexLock lock(&mutex_);
  shut_down_ = true;
  for (Watcher* watcher : watchers_) watcher->GoOn();
}

grpc::Status HealthService::Answer(const std::string& service, HealthCheckResponse* response) const {
  {
    absl::MutexLock lock(&mutex_);
    response->set_status(StatusOf(service));
  }
  if (response->status() != HealthCheckResponse::SERVICE_UNKNOWN) return grpc::Status::OK;
  return {grpc::StatusCode::NOT_FOUND,
          absl::StrCat("service is \"", service.substr(0, kMaxNameBytes), "\"; no such service")};
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context, const HealthCheckRequest* request,
                                               HealthCheckResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(Answer(request->service(), response));
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(grpc::CallbackServerContext*,
                                                                    const HealthCheckRequest* request) {
  return new Watcher(this, request->service().substr(0, kMaxNameBytes + 1));
}

}  // namespace millrace
