// A client that does not read is waited for, at a bounded cost, and only for so long. 184 bytes a token wait for it, so
// 4,000 tokens are far more than gRPC's windows and the router's own buffer.
#include "tests/router/api/router_fixture.h"

namespace millrace {
namespace {

using testing::HasSubstr;

class SlowClientTest : public RouterTest {
 protected:
  void StartWithRoom(RouterOptions options = {}) {
    worker_.ready().mutable_model()->set_max_context(1 << 20);
    worker_.ready().set_num_blocks(1 << 18);
    Start({&worker_}, options);
    AwaitReady();
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // its window does not grow
    slow_stub_ = v1::InferenceService::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("127.0.0.1:", router_->port()), grpc::InsecureChannelCredentials(), arguments));
  }
  static v1::GenerateRequest LongRequest(int max_tokens = 4'000) {
    v1::GenerateRequest request = Request(max_tokens);
    request.mutable_sampling()->set_logprobs(20);
    return request;
  }
  // Not reading: the router must let go of the sequence by itself.
  void AwaitNothingRuns() {
    while (true) {
      const v1::GetStatusResponse status = Status();
      if (status.router().running_sequences() == 0 && status.router().generated_tokens() > 0) return;
    }
  }

  FakeWorker worker_{"w"};
  std::unique_ptr<v1::InferenceService::Stub> slow_stub_;
};

TEST_F(SlowClientTest, IsPausedWithItsBlocksAndGoesOnWhenItReads) {
  StartWithRoom();
  grpc::ClientContext context;
  const auto reader = slow_stub_->Generate(&context, LongRequest());
  // Every step is for all slots: as long as the slow one runs, it gets as many tokens as the other.
  uint64_t others = 0, before = 0, after = 0;
  do {
    before = Status().router().generated_tokens();
    EXPECT_EQ(Generate(Request(100, 7)).choices.at(0).tokens, Expected(7, 100));
    others += 100;
    after = Status().router().generated_tokens();
  } while (after - before > 100 || before == 0);
  const v1::GetStatusResponse paused = Status();
  EXPECT_EQ(paused.router().running_sequences(), 1u);
  EXPECT_EQ(paused.workers(0).used_slots(), 1u);
  EXPECT_GT(paused.workers(0).used_blocks(), 10u);
  EXPECT_LT(after - others, 3'000u);
  Output output;
  for (v1::GenerateResponse message; reader->Read(&message);) Take(message, &output);
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(output.choices.at(0).tokens, Expected(1, 4'000));
  EXPECT_EQ(output.choices.at(0).logprobs.size(), 4'000u);
  EXPECT_EQ(output.choices.at(0).finish.route().preemptions(), 0u);
  AwaitIdle();
}

TEST_F(SlowClientTest, LosesItsCallWhenItDoesNotReadForTooLong) {
  RouterOptions options;
  options.scheduler.max_pause = 20'000;
  StartWithRoom(options);
  grpc::ClientContext context;
  const auto reader = slow_stub_->Generate(&context, LongRequest());
  AwaitNothingRuns();
  EXPECT_LT(Status().router().generated_tokens(), 3'000u);
  for (v1::GenerateResponse message; reader->Read(&message);) {
  }
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("its output was not taken for 20000 us"));
  AwaitIdle();
}

TEST_F(SlowClientTest, LosesItsCallWhenItsLeaseDoesNotFitTheBuffer) {
  RouterOptions options;
  options.scheduler.lease_tokens_ahead = 16'384;
  StartWithRoom(options);
  grpc::ClientContext context;
  const auto reader = slow_stub_->Generate(&context, LongRequest(1'000'000));
  AwaitNothingRuns();
  EXPECT_LT(Status().router().generated_tokens(), 1'000'000u);
  for (v1::GenerateResponse message; reader->Read(&message);) {
  }
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("the client reads too slowly"));
  AwaitIdle();
}

}  // namespace
}  // namespace millrace
