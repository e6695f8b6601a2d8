// A choice's text, and what its request becomes for the scheduler.
#include "router/api/choice_stream.h"

#include <cmath>

#include "gtest/gtest.h"
#include "router/api/sequence_specs.h"
#include "router/api/served_model.h"
#include "tests/fixtures.h"

namespace millrace {
namespace {

class ChoiceStreamTest : public testing::Test {
 protected:
  ChoiceStreamTest() : model_(*ServedModel::Load(Fixture("qwen3-tiny-6x32"), "")) {}

  std::vector<int32_t> Ids(const std::string& text) { return *model_->tokenizer().Encode(text, {}); }
  ChoiceStream Make(const v1::SamplingParams& params) { return {0, params, 7, "id", model_->tokenizer()}; }
  static SequenceEvent Event(const std::vector<int32_t>& ids) {
    SequenceEvent event;
    event.token_ids.assign(ids.begin(), ids.end());
    return event;
  }

  const std::unique_ptr<ServedModel> model_;
};

TEST_F(ChoiceStreamTest, CutsTheTextExactlyBeforeAStopStringAcrossTokens) {
  v1::SamplingParams params;
  params.add_stop("lo w");
  ChoiceStream choice = Make(params);
  std::string text;
  for (const int32_t id : Ids("hello world")) {
    choice.Append(Event({id}));
    if (choice.has_message()) text += choice.TakeMessage().text();
  }
  ASSERT_TRUE(choice.ended());
  choice.Complete({});
  const v1::GenerateResponse last = choice.TakeMessage();
  EXPECT_EQ(text + last.text(), "hel");
  EXPECT_EQ(last.finish().reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(last.finish().stop_string(), "lo w");
  EXPECT_EQ(last.finish().seed(), 7u);
}

TEST_F(ChoiceStreamTest, DropsTokensAfterTheStopInTheSameEvent) {
  v1::SamplingParams params;
  params.add_stop("b");
  params.set_include_stop_string(true);
  ChoiceStream choice = Make(params);
  std::vector<int32_t> ids;
  for (const char* text : {"a", "b", "c"}) ids.push_back(Ids(text).at(0));
  choice.Append(Event(ids));
  choice.Append(Event(ids));
  choice.Complete({});
  const v1::GenerateResponse last = choice.TakeMessage();
  EXPECT_EQ(last.text(), "ab");
  EXPECT_EQ(last.token_ids_size(), 2);
  EXPECT_EQ(last.finish().usage().generated_tokens(), 2u);
}

TEST_F(ChoiceStreamTest, GivesOutHeldTextAndUnfinishedCharactersAtTheEnd) {
  v1::SamplingParams params;
  params.add_stop("xyz");
  ChoiceStream choice = Make(params);
  std::vector<int32_t> ids = Ids("axy");
  SequenceEvent event = Event(ids);
  event.finished = true;
  event.finish_reason = worker::v1::FINISH_REASON_LENGTH;
  choice.Append(event);
  choice.Complete({});
  const v1::GenerateResponse last = choice.TakeMessage();
  EXPECT_EQ(last.text(), "axy");
  EXPECT_EQ(last.finish().reason(), v1::FINISH_REASON_LENGTH);
}

TEST_F(ChoiceStreamTest, SplitsManyPromptLogProbsAndKeepsTheirOrder) {
  ChoiceStream choice = Make({});
  SequenceEvent event = Event({10});
  event.prompt_logprobs.resize(5000);
  for (int i = 0; i < 5000; ++i) event.prompt_logprobs[static_cast<size_t>(i)].set_token_id(i);
  choice.Append(event);
  int next = 0;
  while (choice.has_message()) {
    const v1::GenerateResponse message = choice.TakeMessage();
    EXPECT_LE(message.prompt_logprobs_size(), 2048);
    for (const auto& logprobs : message.prompt_logprobs()) EXPECT_EQ(logprobs.token_id(), next++);
    EXPECT_EQ(message.token_ids_size(), next == 5000 ? 1 : 0);
  }
  EXPECT_EQ(next, 5000);
}

// Characters of several tokens, a stop string that begins in them, and one that never comes to be complete.
TEST_F(ChoiceStreamTest, GoesOnAfterAnyTokenAsIfItHadNeverBroken) {
  v1::SamplingParams params;
  params.add_stop("\xc3\xa9nd here");
  params.add_stop("abd");
  const std::vector<int32_t> ids = Ids("abc \xf0\x9f\x98\x80 abab \xe2\x82\xac \xc3\xa9n \xc3\xa9nd here");
  ChoiceStream whole = Make(params);
  std::vector<std::string> texts;  // of each token
  for (const int32_t id : ids) {
    whole.Append(Event({id}));
    texts.push_back(whole.TakeMessage().text());
  }
  ASSERT_TRUE(whole.ended());
  whole.Complete({});
  const v1::Finish finish = whole.TakeMessage().finish();
  SequenceSpec spec;
  spec.max_tokens = 100;
  for (size_t cut = 0; cut <= ids.size(); ++cut) {
    v1::Resume resume;
    resume.mutable_token_ids()->Add(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(cut));
    ChoiceStream rest = Make(params);
    ASSERT_TRUE(rest.Replay(resume, spec).ok());
    EXPECT_EQ(rest.ended(), cut == ids.size());
    for (size_t i = cut; i < ids.size(); ++i) {
      rest.Append(Event({ids[i]}));
      const v1::GenerateResponse message = rest.TakeMessage();
      EXPECT_EQ(message.text(), texts[i]) << "token " << i << " after " << cut;
      EXPECT_EQ(message.token_ids_size(), 1);
    }
    ASSERT_TRUE(rest.ended());
    rest.Complete({});
    const v1::GenerateResponse last = rest.TakeMessage();
    EXPECT_EQ(last.text(), "");
    EXPECT_EQ(last.finish().SerializeAsString(), finish.SerializeAsString());
  }
}

TEST_F(ChoiceStreamTest, EndsAtOnceIfAllTokensWereReceived) {
  v1::SamplingParams params;
  params.add_stop("cxy");
  SequenceSpec spec;
  spec.stop_token_ids = {Ids("!").at(0)};
  const auto resume = [](const std::vector<int32_t>& ids) {
    v1::Resume received;
    received.mutable_token_ids()->Add(ids.begin(), ids.end());
    return received;
  };
  spec.max_tokens = 3;
  ChoiceStream at_length = Make(params);
  ASSERT_TRUE(at_length.Replay(resume({Ids("a")[0], Ids("b")[0], Ids("c")[0]}), spec).ok());
  ASSERT_TRUE(at_length.ended());
  at_length.Complete({});
  v1::GenerateResponse last = at_length.TakeMessage();
  EXPECT_EQ(last.text(), "c") << "held back until the end was known";
  EXPECT_EQ(last.token_ids_size(), 0);
  EXPECT_EQ(last.finish().reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(last.finish().usage().generated_tokens(), 3u);
  ChoiceStream at_stop = Make(params);
  ASSERT_TRUE(at_stop.Replay(resume({Ids("a")[0], Ids("!")[0]}), spec).ok());
  ASSERT_TRUE(at_stop.ended());
  at_stop.Complete({});
  last = at_stop.TakeMessage();
  EXPECT_EQ(last.finish().reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(last.finish().stop_token_id(), Ids("!")[0]);
  const absl::Status status = Make(params).Replay(resume({Ids("!")[0], Ids("a")[0]}), spec);
  EXPECT_EQ(status.message(), "resume[0].token_ids holds 2; the answer ends after 1");
}

TEST_F(ChoiceStreamTest, SendsOnlyThePromptLogProbsThatHadNotCome) {
  for (const uint32_t known : {0u, 1999u, 3000u, 4000u}) {
    ChoiceStream choice = Make({});
    v1::Resume resume;
    resume.set_prompt_logprobs(known);
    ASSERT_TRUE(choice.Replay(resume, {}).ok());
    SequenceEvent event = Event({10});
    event.prompt_logprobs.resize(3000);
    for (int i = 0; i < 3000; ++i) event.prompt_logprobs[static_cast<size_t>(i)].set_token_id(i);
    choice.Append(event);
    int next = static_cast<int>(std::min(known, 3000u));
    while (choice.has_message()) {
      const v1::GenerateResponse message = choice.TakeMessage();
      for (const auto& logprobs : message.prompt_logprobs()) EXPECT_EQ(logprobs.token_id(), next++);
    }
    EXPECT_EQ(next, 3000);
  }
}

TEST(MakeSpecs, FillsInDefaultsAndForbidsByBias) {
  worker::v1::Model model;
  model.set_vocab_size(100);
  model.add_eos_token_ids(2);
  v1::GenerateRequest request;
  v1::SamplingParams& params = *request.mutable_sampling();
  params.set_n(2);
  params.set_top_k(100);
  params.set_prompt_logprobs(3);
  params.add_stop_token_ids(2);
  params.add_stop_token_ids(9);
  (*params.mutable_logit_bias())[50] = -100;
  (*params.mutable_logit_bias())[5] = 2;
  const auto specs = MakeSpecs(request, {1, 2, 3}, {&model, 64, ~uint64_t{0}, kNever});
  ASSERT_TRUE(specs.ok());
  ASSERT_EQ(specs->size(), 2u);
  const SequenceSpec& first = specs->front();
  EXPECT_EQ(first.max_tokens, 61);
  EXPECT_EQ(first.stop_token_ids, (std::vector<int32_t>{2, 9}));
  EXPECT_EQ(first.sampling.temperature(), 1);
  EXPECT_EQ(first.sampling.top_p(), 1);
  EXPECT_EQ(first.sampling.top_k(), 0u);
  EXPECT_EQ(first.sampling.bias_token_ids(0), 5);
  EXPECT_TRUE(std::isinf(first.sampling.bias_values(1)));
  EXPECT_TRUE(first.sampling.has_prompt_logprobs());
  EXPECT_FALSE((*specs)[1].sampling.has_prompt_logprobs());
  EXPECT_EQ((*specs)[1].sampling.seed(), 0u) << "seeds wrap around";
  params.set_ignore_eos(true);
  params.clear_stop_token_ids();
  EXPECT_TRUE(MakeSpecs(request, {1}, {&model, 64, 1, kNever})->front().stop_token_ids.empty());
}

}  // namespace
}  // namespace millrace
