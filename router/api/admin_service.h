// The operator's service. Any thread; lives as long as the server.
#pragma once

#include <cstdint>
#include <string>

#include "millrace/v1/admin.grpc.pb.h"
#include "router/api/call_registry.h"
#include "router/fleet/fleet.h"

namespace millrace {

using RawAdminService =
    v1::AdminService::WithRawCallbackMethod_GetStatus<v1::AdminService::WithRawCallbackMethod_DrainWorker<
        v1::AdminService::WithRawCallbackMethod_CancelRequest<v1::AdminService::Service>>>;

class AdminService final : public RawAdminService {
 public:
  AdminService(std::string router_id, uint64_t epoch, Fleet* fleet, CallRegistry* registry);

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                      grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* DrainWorker(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CancelRequest(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;

 private:
  const std::string router_id_;
  const uint64_t epoch_;
  const Time started_;
  Fleet* const fleet_;
  CallRegistry* const registry_;
};

}  // namespace millrace
