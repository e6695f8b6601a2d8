// One streaming Generate call through the callback API. Deletes itself after `done`, which comes exactly once; `piece`
// and `done` run on gRPC's threads, one at a time for one call.
#pragma once

#include <chrono>
#include <functional>
#include <optional>

#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "millrace/v1/inference.grpc.pb.h"

namespace millrace {

class CompletionCall : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  using PieceFunction = std::function<void(const v1::GenerateResponse&)>;
  using DoneFunction = std::function<void(const grpc::Status&)>;

  static void Start(v1::InferenceService::Stub& stub, v1::GenerateRequest request,
                    std::optional<std::chrono::milliseconds> timeout, PieceFunction piece, DoneFunction done) {
    auto* call = new CompletionCall(std::move(request), std::move(piece), std::move(done));
    if (timeout.has_value()) call->context_.set_deadline(std::chrono::system_clock::now() + *timeout);
    stub.async()->Generate(&call->context_, &call->request_, call);
    call->StartRead(&call->response_);
    call->StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    piece_(response_);
    StartRead(&response_);
  }
  void OnDone(const grpc::Status& status) override {
    const DoneFunction done = std::move(done_);
    delete this;  // before `done`, after which the channel may go
    done(status);
  }

 private:
  CompletionCall(v1::GenerateRequest request, PieceFunction piece, DoneFunction done)
      : request_(std::move(request)), piece_(std::move(piece)), done_(std::move(done)) {}

  const v1::GenerateRequest request_;
  const PieceFunction piece_;
  DoneFunction done_;
  grpc::ClientContext context_;
  v1::GenerateResponse response_;
};

}  // namespace millrace
