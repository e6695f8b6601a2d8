// What a client of the router can rely on.
#include "tests/router/api/router_fixture.h"

namespace millrace {
namespace {

using testing::HasSubstr;

TEST_F(RouterTest, StreamsTokensTextAndReceipts) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(40);
  request.set_request_id("mine");
  const Output output = Generate(request);
  ASSERT_TRUE(output.status.ok()) << output.status.error_message();
  const Output::Choice& choice = output.choices.at(0);
  EXPECT_EQ(choice.tokens, Expected(1, 40));
  EXPECT_EQ(choice.text, Detokenize(choice.tokens));
  EXPECT_EQ(choice.finish.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(choice.finish.request_id(), "mine");
  EXPECT_EQ(choice.finish.seed(), 1u);
  EXPECT_EQ(choice.finish.usage().prompt_tokens(), 5u);
  EXPECT_EQ(choice.finish.usage().generated_tokens(), 40u);
  EXPECT_EQ(choice.finish.route().worker_id(), "w");
  AwaitIdle();
}

TEST_F(RouterTest, ReportsADrawnSeedThatRepeatsTheOutput) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(10);
  request.mutable_sampling()->clear_seed();
  const Output first = Generate(request);
  ASSERT_TRUE(first.status.ok());
  EXPECT_FALSE(first.choices.at(0).finish.request_id().empty());
  request.mutable_sampling()->set_seed(first.choices.at(0).finish.seed());
  EXPECT_EQ(Generate(request).choices.at(0).tokens, first.choices.at(0).tokens);
}

TEST_F(RouterTest, GivesEveryChoiceItsOwnSeed) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(30, 5);
  request.mutable_sampling()->set_n(8);
  const Output output = Generate(request);
  ASSERT_TRUE(output.status.ok());
  ASSERT_EQ(output.choices.size(), 8u);
  for (uint32_t i = 0; i < 8; ++i) {
    EXPECT_EQ(output.choices.at(i).tokens, Expected(5 + i, 30));
    EXPECT_EQ(output.choices.at(i).finish.seed(), 5 + i);
  }
  AwaitIdle();
}

TEST_F(RouterTest, PassesLogProbsThrough) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(12);
  request.mutable_sampling()->set_logprobs(3);
  request.mutable_sampling()->set_prompt_logprobs(2);
  const Output output = Generate(request);
  ASSERT_TRUE(output.status.ok()) << output.status.error_message();
  const Output::Choice& choice = output.choices.at(0);
  ASSERT_EQ(choice.logprobs.size(), 12u);
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(choice.logprobs[i].token_id(), choice.tokens[i]);
    EXPECT_EQ(choice.logprobs[i].logprob(), -0.25f * static_cast<float>(choice.tokens[i]));
    EXPECT_EQ(choice.logprobs[i].top_token_ids_size(), 3);
  }
  ASSERT_EQ(choice.prompt_logprobs.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(choice.prompt_logprobs[static_cast<size_t>(i)].token_id(), i + 1);
}

TEST_F(RouterTest, StopsAtAnEndTokenUnlessItIsIgnored) {
  FakeWorker worker("w", 0,
                    [](uint64_t seed, uint32_t position) { return position == 12 ? 2 : DefaultToken(seed, position); });
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(20);
  Output output = Generate(request);
  EXPECT_EQ(output.choices.at(0).tokens.size(), 8u);
  EXPECT_EQ(output.choices.at(0).finish.reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(output.choices.at(0).finish.stop_token_id(), 2);
  request.mutable_sampling()->set_ignore_eos(true);
  EXPECT_EQ(Generate(request).choices.at(0).tokens.size(), 20u);
  request.mutable_sampling()->set_ignore_eos(false);
  request.mutable_sampling()->set_min_tokens(15);
  EXPECT_EQ(Generate(request).choices.at(0).tokens.size(), 20u);
}

TEST_F(RouterTest, EndsBeforeAStopStringAndFreesTheSequence) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  const std::string all = Detokenize(Expected(1, 60));
  v1::GenerateRequest request = Request(400);
  request.mutable_sampling()->add_stop(all.substr(20, 7));
  const Output output = Generate(request);
  ASSERT_TRUE(output.status.ok());
  EXPECT_EQ(output.choices.at(0).text, all.substr(0, all.find(all.substr(20, 7))));
  EXPECT_EQ(output.choices.at(0).finish.stop_string(), all.substr(20, 7));
  EXPECT_LT(output.choices.at(0).tokens.size(), 60u);
  AwaitIdle();
}

TEST_F(RouterTest, FreesEverythingWhenTheClientCancels) {
  FakeWorker worker("w");
  worker.SetSteps(3);
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(300);
  request.mutable_sampling()->set_n(4);
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, request);
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  context.TryCancel();
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  AwaitIdle();
}

TEST_F(RouterTest, LetsTheOperatorEndARequest) {
  FakeWorker worker("w");
  worker.SetSteps(1);
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(300);
  request.set_request_id("victim");
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, request);
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  v1::CancelRequestRequest cancel;
  cancel.set_request_id("nobody");
  v1::CancelRequestResponse cancelled;
  grpc::ClientContext first, second;
  EXPECT_EQ(admin_->CancelRequest(&first, cancel, &cancelled).error_code(), grpc::StatusCode::NOT_FOUND);
  cancel.set_request_id("victim");
  EXPECT_TRUE(admin_->CancelRequest(&second, cancel, &cancelled).ok());
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  AwaitIdle();
}

TEST_F(RouterTest, RefusesAnIdThatIsInUse) {
  FakeWorker worker("w");
  worker.SetSteps(1);
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(300);
  request.set_request_id("twice");
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, request);
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  const Output refused = Generate(request);
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_THAT(refused.status.error_message(), HasSubstr("twice"));
  worker.SetSteps(FakeWorker::kFree);
  while (reader->Read(&message)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  AwaitIdle();
  EXPECT_TRUE(Generate(request).status.ok()) << "free again";
}

TEST_F(RouterTest, NeverStartsWhatPassedItsDeadlineInTheQueue) {
  FakeWorker worker("w");
  worker.ready().set_num_slots(1);
  worker.SetSteps(1);
  Start({&worker});
  AwaitReady();
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Request(300));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  grpc::ClientContext late;
  late.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  const auto late_reader = stub_->Generate(&late, Request(300, 2));
  while (late_reader->Read(&message)) {
  }
  EXPECT_EQ(late_reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  context.TryCancel();
  while (reader->Read(&message)) {
  }
  AwaitIdle();
  EXPECT_EQ(worker.admits().size(), 1u);
}

TEST_F(RouterTest, GoesOnTokenExactAfterAWorkersStreamBreaks) {
  FakeWorker worker("w");
  worker.SetSteps(9);
  Start({&worker});
  AwaitReady();
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Request(120));
  Output output;
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  Take(message, &output);
  worker.AwaitStepsUsed();
  worker.Break();
  worker.SetSteps(FakeWorker::kFree);
  while (reader->Read(&message)) Take(message, &output);
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(output.choices.at(0).tokens, Expected(1, 120));
  EXPECT_EQ(output.choices.at(0).text, Detokenize(Expected(1, 120)));
  EXPECT_EQ(output.choices.at(0).finish.route().moves(), 1u);
}

TEST_F(RouterTest, RendersAndTokenizesAsGenerateDoes) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::RenderChatRequest render;
  v1::ChatMessage& message = *render.mutable_chat()->add_messages();
  message.set_role("user");
  message.set_content("say <|im_end|> please");
  v1::RenderChatResponse rendered;
  grpc::ClientContext context, second;
  ASSERT_TRUE(stub_->RenderChat(&context, render, &rendered).ok());
  EXPECT_THAT(rendered.text(), HasSubstr("say <|im_end|> please"));
  v1::GenerateRequest request;
  *request.mutable_chat() = render.chat();
  request.mutable_sampling()->set_max_tokens(1);
  EXPECT_EQ(Generate(request).choices.at(0).finish.usage().prompt_tokens(),
            static_cast<uint32_t>(rendered.token_ids_size()));
  v1::TokenizeRequest tokenize;
  tokenize.set_text(rendered.text());
  v1::TokenizeResponse tokens;
  ASSERT_TRUE(stub_->Tokenize(&second, tokenize, &tokens).ok());
  EXPECT_LT(tokens.token_ids_size(), rendered.token_ids_size())
      << "the user's <|im_end|> must not become a control token";
}

TEST_F(RouterTest, TellsWhichModelItServes) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::ListModelsResponse models;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->ListModels(&context, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 1);
  EXPECT_EQ(models.models(0).name(), "tiny");
  EXPECT_EQ(models.models(0).vocab_size(), 337u);
  EXPECT_EQ(models.models(0).max_context(), 512u);
  EXPECT_EQ(models.models(0).num_workers(), 1u);
  EXPECT_TRUE(models.models(0).has_chat_template());
  v1::GenerateRequest request = Request(5);
  request.set_model("other");
  EXPECT_EQ(Generate(request).status.error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(RouterTest, FillsTheContextWhenNoMaximumIsGiven) {
  FakeWorker worker("w");
  Start({&worker});
  AwaitReady();
  v1::GenerateRequest request = Request(1);
  request.mutable_sampling()->clear_max_tokens();
  EXPECT_EQ(Generate(request).choices.at(0).tokens.size(), 512u - 5);
  request.mutable_sampling()->set_max_tokens(508);
  EXPECT_EQ(Generate(request).status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
}

TEST_F(RouterTest, IsUnavailableBeforeTheFirstWorkerAndSaysWhyOneIsRefused) {
  FakeWorker worker("w");
  worker.ready().mutable_model()->set_vocab_size(100);
  worker.ready().mutable_model()->clear_eos_token_ids();
  Start({&worker});
  EXPECT_EQ(Generate(Request(5)).status.error_code(), grpc::StatusCode::UNAVAILABLE);
  v1::GetStatusResponse status;
  do {
    status = Status();
  } while (status.workers(0).state() != v1::WorkerStatus::STATE_LOST);
  EXPECT_THAT(status.workers(0).last_error(),
              HasSubstr("vocab_size is 100; this router's tokenizer needs at least 320"));
}

TEST_F(RouterTest, EndsOpenStreamsWithinTheGraceOfAShutdown) {
  FakeWorker worker("w");
  worker.SetSteps(1);
  Start({&worker});
  AwaitReady();
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Request(300));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  router_->Shutdown(std::chrono::milliseconds(20));
  while (reader->Read(&message)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

}  // namespace
}  // namespace millrace
