// An InferenceService and AdminService in the test's own process, on a free port. It answers a prompt with its own
// words, one token a piece, and can hold answers back until others have come. Lives as long as the test; thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "millrace/v1/admin.grpc.pb.h"
#include "millrace/v1/inference.grpc.pb.h"

namespace millrace {

class FakeRouter : public v1::InferenceService::Service, public v1::AdminService::Service {
 public:
  FakeRouter() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(static_cast<v1::InferenceService::Service*>(this));
    builder.RegisterService(static_cast<v1::AdminService::Service*>(this));
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  ~FakeRouter() override { server_->Shutdown(); }

  const std::string& address() const { return address_; }
  std::vector<v1::GenerateRequest> requests() {
    absl::MutexLock lock(&mutex_);
    return requests_;
  }

  // A request called "last" waits until `others` others have been answered in full.
  grpc::Status Generate(grpc::ServerContext*, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override {
    {
      absl::MutexLock lock(&mutex_);
      requests_.push_back(*request);
      if (request->request_id() == "last") mutex_.Await(absl::Condition(this, &FakeRouter::OthersAreDone));
    }
    if (request->model() == "missing") return {grpc::StatusCode::NOT_FOUND, "no model 'missing'"};
    const int n = std::max(request->sampling().n(), 1);
    for (int token = 0; token < 3; ++token) {
      for (int choice = 0; choice < n; ++choice) writer->Write(Piece(*request, choice, token));
    }
    absl::MutexLock lock(&mutex_);
    ++num_done_;
    return grpc::Status::OK;
  }
  grpc::Status ListModels(grpc::ServerContext*, const v1::ListModelsRequest*,
                          v1::ListModelsResponse* response) override {
    v1::ModelInfo& model = *response->add_models();
    model.set_name("fake");
    model.set_vocab_size(700);
    return grpc::Status::OK;
  }
  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*, v1::GetStatusResponse* response) override {
    response->mutable_router()->set_router_id("fake-router");
    v1::WorkerStatus& worker = *response->add_workers();
    worker.set_worker_id("worker-0");
    worker.set_state(v1::WorkerStatus::STATE_READY);
    worker.set_num_slots(8);
    return grpc::Status::OK;
  }

  int others = 0;

 private:
  static v1::GenerateResponse Piece(const v1::GenerateRequest& request, int choice, int token) {
    v1::GenerateResponse piece;
    piece.set_index(static_cast<uint32_t>(choice));
    piece.add_token_ids(10 * choice + token);
    std::string words = request.has_text() ? request.text() : "";
    if (request.has_chat()) words = request.chat().messages(request.chat().messages_size() - 1).content();
    piece.set_text(token == 0 ? words : token == 1 ? "!" : "");
    if (request.sampling().has_logprobs()) piece.add_logprobs()->set_logprob(-0.5);
    if (request.sampling().has_prompt_logprobs() && token == 0 && choice == 0)
      piece.add_prompt_logprobs()->set_token_id(4);
    if (token < 2) return piece;
    v1::Finish& finish = *piece.mutable_finish();
    finish.set_reason(request.sampling().max_tokens() == 3 ? v1::FINISH_REASON_LENGTH : v1::FINISH_REASON_STOP);
    finish.mutable_usage()->set_prompt_tokens(20);
    finish.mutable_usage()->set_cached_tokens(16);
    finish.mutable_usage()->set_generated_tokens(3);
    finish.mutable_timing()->set_decode_us(1000);
    finish.set_seed(request.sampling().seed() + static_cast<uint64_t>(choice));
    finish.mutable_route()->set_worker_id("worker-0");
    return piece;
  }
  bool OthersAreDone() const { return num_done_ >= others; }

  absl::Mutex mutex_;
  std::vector<v1::GenerateRequest> requests_;
  int num_done_ = 0;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace millrace
