// The clients' service. Requests arrive as bytes (wire.h). Each handler runs to its end on the gRPC thread that called
// it; only Generate leaves something behind, a GenerateCall. Any thread; lives as long as the server.
#pragma once

#include "millrace/v1/inference.grpc.pb.h"
#include "router/api/call_registry.h"
#include "router/api/request_metrics.h"
#include "router/api/request_trace.h"
#include "router/api/router_access.h"
#include "router/api/served_model.h"
#include "router/fleet/fleet.h"

namespace millrace {

using RawInferenceService =
    v1::InferenceService::WithRawCallbackMethod_Generate<v1::InferenceService::WithRawCallbackMethod_Tokenize<
        v1::InferenceService::WithRawCallbackMethod_Detokenize<v1::InferenceService::WithRawCallbackMethod_RenderChat<
            v1::InferenceService::WithRawCallbackMethod_ListModels<v1::InferenceService::Service>>>>>;

class InferenceService final : public RawInferenceService {
 public:
  InferenceService(const ServedModel* model, const RouterAccess* access, Fleet* fleet, CallRegistry* registry,
                   RequestMetrics* metrics, SpanExporter* spans)
      : model_(model), access_(access), fleet_(fleet), registry_(registry), metrics_(metrics), spans_(spans) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* RenderChat(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;

 private:
  // The running call, owned by the registry; it has taken `trace`.
  absl::StatusOr<GenerateCall*> BeginGenerate(const grpc::CallbackServerContext& context, const grpc::ByteBuffer& bytes,
                                              Time arrived, RequestTrace& trace);

  const ServedModel* const model_;
  const RouterAccess* const access_;
  Fleet* const fleet_;
  CallRegistry* const registry_;
  RequestMetrics* const metrics_;
  SpanExporter* const spans_;  // null: none are exported
};

}  // namespace millrace
