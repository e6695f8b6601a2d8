#include "router/api/admin_service.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/api/generate_call.h"
#include "router/api/validate.h"
#include "router/api/wire.h"
#include "router/fleet/clock.h"

namespace millrace {
namespace {

constexpr uint32_t kDefaultDrainMs = 20'000;  // as a worker's --drain_ms

}  // namespace

AdminService::AdminService(std::string router_id, uint64_t epoch, Fleet* fleet, CallRegistry* registry)
    : router_id_(std::move(router_id)), epoch_(epoch), started_(MonotonicNow()), fleet_(fleet), registry_(registry) {}

grpc::ServerUnaryReactor* AdminService::GetStatus(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return Answer<v1::GetStatusRequest, v1::GetStatusResponse>(
      context, *request, response, [this](const v1::GetStatusRequest&, v1::GetStatusResponse* out) {
        const SchedulerCounts counts = fleet_->counts();
        v1::RouterStatus* const router = out->mutable_router();
        router->set_router_id(router_id_);
        router->set_epoch(epoch_);
        router->set_uptime_us(static_cast<uint64_t>(MonotonicNow() - started_));
        router->set_open_streams(static_cast<uint32_t>(registry_->size()));
        router->set_waiting_sequences(static_cast<uint32_t>(counts.queued));
        router->set_running_sequences(static_cast<uint32_t>(counts.running));
        router->set_finished_sequences(counts.finished);
        router->set_generated_tokens(counts.generated_tokens);
        router->set_prompt_tokens(counts.prompt_tokens);
        router->set_cached_tokens(counts.cached_tokens);
        router->set_preemptions(counts.preemptions);
        router->set_version(MILLRACE_VERSION);
        for (v1::WorkerStatus& worker : fleet_->workers()) *out->add_workers() = std::move(worker);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* AdminService::DrainWorker(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return Answer<v1::DrainWorkerRequest, v1::DrainWorkerResponse>(
      context, *request, response, [this](const v1::DrainWorkerRequest& in, v1::DrainWorkerResponse*) {
        absl::Status status = Validate(in);
        if (!status.ok()) return status;
        const uint32_t budget_ms = in.has_budget_ms() ? in.budget_ms() : kDefaultDrainMs;
        return fleet_->DrainWorker(in.worker_id(), Time{budget_ms} * 1000);
      });
}

grpc::ServerUnaryReactor* AdminService::CancelRequest(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  return Answer<v1::CancelRequestRequest, v1::CancelRequestResponse>(
      context, *request, response,
      [this](const v1::CancelRequestRequest& in, v1::CancelRequestResponse*) -> absl::Status {
        if (absl::Status status = Validate(in); !status.ok()) return status;
        const std::shared_ptr<GenerateCall> call = registry_->Find(in.request_id());
        if (call == nullptr) {
          return absl::NotFoundError(absl::StrCat("request_id is \"", in.request_id(), "\"; no such request is open"));
        }
        call->Abort({grpc::StatusCode::CANCELLED, "cancelled by the operator"});
        return absl::OkStatus();
      });
}

}  // namespace millrace
