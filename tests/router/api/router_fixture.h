// A whole router in this process, in front of fake workers, on ports of the system's choice.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "millrace/v1/admin.grpc.pb.h"
#include "millrace/v1/inference.grpc.pb.h"
#include "router/api/router_server.h"
#include "tests/fixtures.h"
#include "tests/router/fleet/fake_worker.h"

namespace millrace {

// What a finished call gave, choice by choice.
struct Output {
  struct Choice {
    std::vector<int32_t> tokens;
    std::string text;
    std::vector<v1::TokenLogProbs> logprobs, prompt_logprobs;
    v1::Finish finish;
  };
  std::map<uint32_t, Choice> choices;
  grpc::Status status;
};

inline void Take(const v1::GenerateResponse& message, Output* output) {
  Output::Choice& choice = output->choices[message.index()];
  choice.tokens.insert(choice.tokens.end(), message.token_ids().begin(), message.token_ids().end());
  choice.text += message.text();
  choice.logprobs.insert(choice.logprobs.end(), message.logprobs().begin(), message.logprobs().end());
  choice.prompt_logprobs.insert(choice.prompt_logprobs.end(), message.prompt_logprobs().begin(),
                                message.prompt_logprobs().end());
  if (message.has_finish()) choice.finish = message.finish();
}

class RouterTest : public testing::Test {
 protected:
  void Start(const std::vector<FakeWorker*>& workers, RouterOptions options = {}) {
    options.model = Fixture("qwen3-tiny-6x32").string();
    options.model_name = "tiny";
    options.listen = "127.0.0.1:0";
    for (const FakeWorker* worker : workers) options.workers.push_back(worker->address());
    router_ = *RouterServer::Start(options, [this] {
      absl::MutexLock lock(&mutex_);
      ready_ = true;
    });
    channel_ = grpc::CreateChannel(absl::StrCat("127.0.0.1:", router_->port()), grpc::InsecureChannelCredentials());
    stub_ = v1::InferenceService::NewStub(channel_);
    admin_ = v1::AdminService::NewStub(channel_);
  }
  void AwaitReady() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&ready_));
  }

  static v1::GenerateRequest Request(int max_tokens, uint64_t seed = 1) {
    v1::GenerateRequest request;
    for (int32_t id = 20; id < 25; ++id) request.mutable_token_ids()->add_ids(id);
    request.mutable_sampling()->set_max_tokens(max_tokens);
    request.mutable_sampling()->set_seed(seed);
    return request;
  }
  static std::vector<int32_t> Expected(uint64_t seed, int count, uint32_t prompt_tokens = 5) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(DefaultToken(seed, prompt_tokens + static_cast<uint32_t>(i)));
    return tokens;
  }
  Output Generate(const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    Output output;
    const auto reader = stub_->Generate(&context, request);
    for (v1::GenerateResponse message; reader->Read(&message);) Take(message, &output);
    output.status = reader->Finish();
    return output;
  }
  std::string Detokenize(const std::vector<int32_t>& tokens) {
    v1::DetokenizeRequest request;
    request.mutable_token_ids()->Add(tokens.begin(), tokens.end());
    v1::DetokenizeResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->Detokenize(&context, request, &response).ok());
    return response.text();
  }
  v1::GetStatusResponse Status() {
    v1::GetStatusResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(admin_->GetStatus(&context, {}, &response).ok());
    return response;
  }
  // Asks again until nothing is queued, running or open, and every block is free or cached.
  void AwaitIdle() {
    while (true) {
      const v1::GetStatusResponse status = Status();
      const bool idle = status.router().open_streams() == 0 && status.router().running_sequences() == 0 &&
                        status.router().waiting_sequences() == 0;
      uint32_t held = 0;
      for (const auto& worker : status.workers())
        held += worker.used_slots() + worker.used_blocks() + worker.quarantined_blocks();
      if (idle && held == 0) return;
    }
  }

  absl::Mutex mutex_;
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<RouterServer> router_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

}  // namespace millrace
