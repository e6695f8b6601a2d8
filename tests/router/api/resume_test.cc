// An answer that was cut off goes on at another router, exactly after the tokens that its client brings.
#include "tests/router/api/router_fixture.h"

namespace millrace {
namespace {

using testing::HasSubstr;

// Reads until each of the n choices has at least `count` tokens or its Finish, then leaves.
Output ReadSome(v1::InferenceService::Stub& stub, const v1::GenerateRequest& request, size_t count) {
  grpc::ClientContext context;
  Output output;
  const auto reader = stub.Generate(&context, request);
  const auto enough = [&] {
    for (const auto& [index, choice] : output.choices) {
      if (choice.tokens.size() < count && choice.finish.request_id().empty()) return false;
    }
    return output.choices.size() == static_cast<size_t>(request.sampling().n());
  };
  for (v1::GenerateResponse message; !enough() && reader->Read(&message);) Take(message, &output);
  context.TryCancel();
  for (v1::GenerateResponse message; reader->Read(&message);) Take(message, &output);
  output.status = reader->Finish();
  return output;
}

v1::GenerateRequest Resumed(v1::GenerateRequest request, const Output& output) {
  const uint32_t choices = request.sampling().has_n() ? static_cast<uint32_t>(request.sampling().n()) : 1;
  for (uint32_t i = 0; i < choices; ++i) {
    v1::Resume& resume = *request.add_resume();
    const auto found = output.choices.find(i);
    if (found == output.choices.end()) continue;
    resume.mutable_token_ids()->Add(found->second.tokens.begin(), found->second.tokens.end());
    resume.set_finished(!found->second.finish.request_id().empty());
  }
  return request;
}

TEST_F(RouterTest, GoesOnExactlyAfterTheTokensThatTheClientBrings) {
  FakeWorker first("first"), second("second");
  Start({&first});
  AwaitReady();
  const auto other = [&] {
    RouterOptions options;
    options.model = Fixture("qwen3-tiny-6x32").string();
    options.listen = "127.0.0.1:0";
    options.workers = {second.address()};
    return *RouterServer::Start(options, nullptr);
  }();
  const auto other_stub = v1::InferenceService::NewStub(
      grpc::CreateChannel(absl::StrCat("127.0.0.1:", other->port()), grpc::InsecureChannelCredentials()));
  v1::GenerateRequest request = Request(200, 5);
  request.mutable_sampling()->set_n(3);
  request.mutable_sampling()->set_logprobs(1);
  request.mutable_sampling()->set_presence_penalty(1);
  request.mutable_sampling()->set_min_tokens(100);
  const std::string all = Detokenize(Expected(6, 200));
  request.mutable_sampling()->add_stop(all.substr(30, 9));  // of choice 1
  const Output whole = Generate(request);
  ASSERT_TRUE(whole.status.ok()) << whole.status.error_message();
  ASSERT_EQ(whole.choices.at(1).finish.reason(), v1::FINISH_REASON_STOP);
  for (const size_t cut : {1u, 8u, 33u, 77u, 150u}) {
    SCOPED_TRACE(cut);
    first.SetSteps(static_cast<int64_t>(cut) + 20);
    Output output = ReadSome(*stub_, request, cut);
    grpc::ClientContext context;
    const auto reader = other_stub->Generate(&context, Resumed(request, output));
    for (v1::GenerateResponse message; reader->Read(&message);) Take(message, &output);
    const grpc::Status status = reader->Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();
    for (const auto& [index, choice] : whole.choices) {
      EXPECT_EQ(output.choices.at(index).tokens, choice.tokens) << index;
      EXPECT_EQ(output.choices.at(index).text, choice.text) << index;
      EXPECT_EQ(output.choices.at(index).logprobs.size(), choice.logprobs.size()) << index;
      EXPECT_EQ(output.choices.at(index).finish.reason(), choice.finish.reason()) << index;
      EXPECT_EQ(output.choices.at(index).finish.usage().generated_tokens(), choice.tokens.size()) << index;
      EXPECT_EQ(output.choices.at(index).finish.usage().prompt_tokens(), 5u) << index;
    }
  }
  first.SetSteps(FakeWorker::kFree);
  int with_output = 0;
  for (const worker::v1::Admit& admit : second.admits()) {
    EXPECT_EQ(admit.num_prompt_tokens(), 5u);
    EXPECT_EQ(admit.max_length(), 205u);
    EXPECT_EQ(admit.min_length(), 105u);
    with_output += admit.num_cached_tokens() + static_cast<uint32_t>(admit.token_ids_size()) > 5;
  }
  EXPECT_GT(with_output, 0);
  AwaitIdle();
}

TEST_F(RouterTest, FinishesWhatHadAllItsTokensAndIsSilentAboutWhatHadFinished) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(40);
  request.mutable_sampling()->set_n(2);
  const Output whole = Generate(request);
  v1::GenerateRequest resumed = Resumed(request, whole);
  const Output nothing = Generate(resumed);
  EXPECT_TRUE(nothing.status.ok());
  EXPECT_TRUE(nothing.choices.empty());
  resumed.mutable_resume(1)->set_finished(false);
  const Output finish = Generate(resumed);
  EXPECT_TRUE(finish.status.ok());
  ASSERT_EQ(finish.choices.size(), 1u);
  EXPECT_TRUE(finish.choices.at(1).tokens.empty());
  EXPECT_EQ(finish.choices.at(1).finish.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(finish.choices.at(1).finish.seed(), 2u);
  EXPECT_EQ(finish.choices.at(1).finish.usage().generated_tokens(), 40u);
  EXPECT_EQ(finish.choices.at(1).finish.usage().prompt_tokens(), 5u);
  EXPECT_EQ(worker.admits().size(), 2u) << "nothing was left to compute";
  AwaitIdle();
}

TEST_F(RouterTest, RefusesToResumeWhatCannotBeAnAnswer) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(40);
  request.add_resume();
  for (const int32_t id : {30, 2, 31}) request.mutable_resume(0)->add_token_ids(id);
  const Output after_the_end = Generate(request);
  EXPECT_EQ(after_the_end.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(after_the_end.status.error_message(), HasSubstr("holds 3; the answer ends after 2"));
  request.mutable_sampling()->set_ignore_eos(true);
  EXPECT_EQ(Generate(request).choices.at(0).tokens.size(), 37u);
  request.mutable_resume(0)->add_token_ids(337);
  EXPECT_THAT(Generate(request).status.error_message(), HasSubstr("resume[0].token_ids[3] is 337; the limit is"));
  AwaitIdle();
}

}  // namespace
}  // namespace millrace
