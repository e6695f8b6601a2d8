#include "cli/request_json.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"

namespace millrace {
namespace {

using ::testing::HasSubstr;

void ExpectRequest(const std::string& line, const std::string& proto) {
  v1::GenerateRequest want;
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(proto, &want)) << proto;
  const absl::StatusOr<CompletionRequest> got = ParseCompletion(line);
  ASSERT_TRUE(got.ok()) << line << ": " << got.status();
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(got->request, want)) << got->request.DebugString();
}

std::string Error(const std::string& line) {
  const absl::StatusOr<CompletionRequest> got = ParseCompletion(line);
  return got.ok() ? "" : absl::StatusCodeToString(got.status().code()) + ": " + std::string(got.status().message());
}

TEST(RequestJson, SetsEverySamplingFieldByItsName) {
  ExpectRequest(R"({"prompt": "a", "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0, "repetition_penalty": 2,
    "presence_penalty": -1, "frequency_penalty": 1.5, "logit_bias": {"5": -100, "7": 1.5}, "seed": 18446744073709551615,
    "stop": ["x", "y"], "stop_token_ids": [1, 2], "max_tokens": 9, "min_tokens": 2, "ignore_eos": true, "logprobs": 0,
    "prompt_logprobs": 4, "n": 2, "skip_special_tokens": false, "include_stop_string": true})",
                R"(text: "a" sampling { temperature: 0.5 top_k: 3 top_p: 0.25 min_p: 0 repetition_penalty: 2
    presence_penalty: -1 frequency_penalty: 1.5 logit_bias { key: 5 value: -100 } logit_bias { key: 7 value: 1.5 }
    seed: 18446744073709551615 stop: "x" stop: "y" stop_token_ids: [1, 2] max_tokens: 9 min_tokens: 2 ignore_eos: true
    logprobs: 0 prompt_logprobs: 4 n: 2 skip_special_tokens: false include_stop_string: true })");
}

TEST(RequestJson, KnowsEveryFieldOfTheProto) {
  const auto* fields = v1::SamplingParams::descriptor();
  for (int i = 0; i < fields->field_count(); ++i) {
    const std::string error = Error("{\"prompt\": \"a\", \"" + fields->field(i)->name() + "\": {\"\": []}}");
    EXPECT_THAT(error, HasSubstr("INVALID_ARGUMENT: " + fields->field(i)->name())) << error;
  }
}

TEST(RequestJson, SetsTheRequestsOwnFields) {
  ExpectRequest(
      R"({"token_ids": [0, 5, 2147483647], "request_id": "r", "model": "m", "cache_salt": "s", "tenant": "t", "priority": -3})",
      R"(token_ids { ids: [0, 5, 2147483647] } request_id: "r" model: "m" cache_salt: "s" tenant: "t" priority: -3)");
  EXPECT_EQ(ParseCompletion(R"({"prompt": "", "deadline_ms": 250})")->deadline_ms, 250);
  EXPECT_TRUE(ParseCompletion(R"({"prompt": ""})")->request.has_text());
}

TEST(RequestJson, KeepsTheOrderOfKeysInChats) {
  ExpectRequest(R"({"messages": [{"role": "user", "content": "hi"},
      {"role": "assistant", "content": null, "tool_calls": [{"z": 1, "a": 2}], "name": "n"}],
      "tools": [{"b": 1, "a": {}}], "add_generation_prompt": false, "chat_template_kwargs": {"enable_thinking": false}})",
                R"(chat { messages { role: "user" content: "hi" }
      messages { role: "assistant" extra_json: "{\"tool_calls\":[{\"z\":1,\"a\":2}],\"name\":\"n\"}" }
      tools_json: "[{\"b\":1,\"a\":{}}]" add_generation_prompt: false
      template_kwargs_json: "{\"enable_thinking\":false}" })");
}

TEST(RequestJson, TakesOneStopStringAndNullAsAbsent) {
  ExpectRequest(R"({"prompt": "a", "stop": "x", "seed": null})", R"(text: "a" sampling { stop: "x" })");
}

TEST(RequestJson, NamesWhatIsWrong) {
  EXPECT_THAT(Error(R"({"prompt": "a", "temprature": 1})"), HasSubstr("INVALID_ARGUMENT: unknown field 'temprature'"));
  EXPECT_THAT(Error(R"({"prompt": "a", "temperature": "hot"})"), HasSubstr("temperature: a number, not \"hot\""));
  EXPECT_THAT(Error(R"({"prompt": "a", "top_k": 1.5})"), HasSubstr("top_k: an integer"));
  EXPECT_THAT(Error(R"({"prompt": "a", "top_k": 2147483648})"),
              HasSubstr("top_k: an integer of -2147483648 … 2147483647"));
  EXPECT_THAT(Error(R"({"prompt": "a", "seed": -1})"),
              HasSubstr("seed: an integer of 0 … 18446744073709551615, not -1"));
  EXPECT_THAT(Error(R"({"prompt": "a", "deadline_ms": 0})"), HasSubstr("deadline_ms"));
  EXPECT_THAT(Error(R"({"prompt": "a", "logit_bias": {"x": 1}})"), HasSubstr("logit_bias"));
  EXPECT_THAT(Error(R"({"token_ids": [1, "2"]})"), HasSubstr("token_ids[1]"));
  EXPECT_THAT(Error(R"({"messages": [{"content": "x"}]})"), HasSubstr("messages[0]: no role"));
  EXPECT_THAT(Error(R"({"messages": [{"role": "user", "content": [1]}]})"), HasSubstr("messages[0].content"));
}

TEST(RequestJson, WantsExactlyOnePrompt) {
  EXPECT_THAT(Error("{}"), HasSubstr("0 given"));
  EXPECT_THAT(Error(R"({"prompt": "a", "token_ids": [1]})"), HasSubstr("2 given"));
  EXPECT_THAT(Error(R"({"prompt": "a", "tools": []})"), HasSubstr("go with messages"));
}

TEST(RequestJson, SurvivesWhatIsNoRequest) {
  for (const std::string& line :
       {std::string("{"), std::string("[]"), std::string("3"), std::string("{\"prompt\": \"\xff\"}"),
        std::string(100000, '['), std::string("{\"prompt\":\"a\",\"n\":1e400}")}) {
    EXPECT_THAT(Error(line), HasSubstr("INVALID_ARGUMENT")) << line.substr(0, 40);
  }
}

}  // namespace
}  // namespace millrace
