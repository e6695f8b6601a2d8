#include "router/api/validate.h"

#include <cmath>
#include <functional>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace millrace {
namespace {

using testing::HasSubstr;
using v1::GenerateRequest;
using v1::SamplingParams;

GenerateRequest Good() {
  GenerateRequest request;
  request.set_text("hello");
  return request;
}

struct Bad {
  const char* message;  // part of it
  std::function<void(GenerateRequest&)> change;
};

Bad Sampling(const char* message, std::function<void(SamplingParams&)> change) {
  return {message, [change](GenerateRequest& request) { change(*request.mutable_sampling()); }};
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<Bad> BadRequests() {
  std::vector<Bad> bad = {
      {"request_id has 129 bytes; the limit is 0 to 128", [](auto& r) { r.set_request_id(std::string(129, 'x')); }},
      {"model has 257 bytes; the limit is 0 to 256", [](auto& r) { r.set_model(std::string(257, 'x')); }},
      {"cache_salt has 129 bytes", [](auto& r) { r.set_cache_salt(std::string(129, 'x')); }},
      {"tenant has 129 bytes", [](auto& r) { r.set_tenant(std::string(129, 'x')); }},
      {"priority is 101; the limit is -100 to 100", [](auto& r) { r.set_priority(101); }},
      {"priority is -101", [](auto& r) { r.set_priority(-101); }},
      {"prompt is not set", [](auto& r) { r.clear_text(); }},
      {"text has 4194305 bytes; the limit is 0 to 4194304",
       [](auto& r) { r.set_text(std::string((4 << 20) + 1, 'x')); }},
      {"token_ids.ids holds 0", [](auto& r) { r.mutable_token_ids(); }},
      {"chat.messages holds 0; the limit is 1 to 4096", [](auto& r) { r.mutable_chat(); }},
      {"chat.messages holds 4097",
       [](auto& r) {
         for (int i = 0; i < 4097; ++i) r.mutable_chat()->add_messages()->set_role("user");
       }},
      {"chat.messages[0].role has 0 bytes", [](auto& r) { r.mutable_chat()->add_messages(); }},
      {"chat.messages[0].role has 65 bytes",
       [](auto& r) { r.mutable_chat()->add_messages()->set_role(std::string(65, 'x')); }},
      {"chat.messages[0].extra_json has 65537 bytes",
       [](auto& r) {
         r.mutable_chat()->add_messages()->set_role("user");
         r.mutable_chat()->mutable_messages(0)->set_extra_json(std::string(65537, ' '));
       }},
      {"chat.messages[].content has 4194306 bytes",
       [](auto& r) {
         for (int i = 0; i < 2; ++i) {
           r.mutable_chat()->add_messages()->set_role("user");
           r.mutable_chat()->mutable_messages(i)->set_content(std::string((2 << 20) + 1, 'x'));
         }
       }},
      {"chat.tools_json has 1048577 bytes",
       [](auto& r) {
         r.mutable_chat()->add_messages()->set_role("user");
         r.mutable_chat()->set_tools_json(std::string((1 << 20) + 1, ' '));
       }},
      {"chat.template_kwargs_json has 65537 bytes",
       [](auto& r) {
         r.mutable_chat()->add_messages()->set_role("user");
         r.mutable_chat()->set_template_kwargs_json(std::string(65537, ' '));
       }},
      Sampling("sampling.top_p is 1.5; the limit is (0, 1]", [](auto& s) { s.set_top_p(1.5); }),
      Sampling("sampling.top_p is 0;", [](auto& s) { s.set_top_p(0); }),
      Sampling("sampling.temperature is -0.1; the limit is [0, 100]", [](auto& s) { s.set_temperature(-0.1f); }),
      Sampling("sampling.temperature is 100.5", [](auto& s) { s.set_temperature(100.5); }),
      Sampling("sampling.top_k is -1; the least is 0", [](auto& s) { s.set_top_k(-1); }),
      Sampling("sampling.min_p is 1.25", [](auto& s) { s.set_min_p(1.25); }),
      Sampling("sampling.min_p is -1", [](auto& s) { s.set_min_p(-1); }),
      Sampling("sampling.repetition_penalty is 0; the limit is (0, 100]", [](auto& s) { s.set_repetition_penalty(0); }),
      Sampling("sampling.repetition_penalty is 101", [](auto& s) { s.set_repetition_penalty(101); }),
      Sampling("sampling.presence_penalty is 101; the limit is [-100, 100]",
               [](auto& s) { s.set_presence_penalty(101); }),
      Sampling("sampling.frequency_penalty is -101", [](auto& s) { s.set_frequency_penalty(-101); }),
      Sampling("sampling.logit_bias[7] is 100.5", [](auto& s) { (*s.mutable_logit_bias())[7] = 100.5; }),
      Sampling("sampling.logit_bias holds 1025; the limit is 0 to 1024",
               [](auto& s) {
                 for (int i = 0; i < 1025; ++i) (*s.mutable_logit_bias())[i] = 1;
               }),
      Sampling("sampling.stop holds 17; the limit is 0 to 16",
               [](auto& s) {
                 for (int i = 0; i < 17; ++i) s.add_stop("x");
               }),
      Sampling("sampling.stop[0] has 0 bytes; the limit is 1 to 256", [](auto& s) { s.add_stop(""); }),
      Sampling("sampling.stop[1] has 257 bytes",
               [](auto& s) {
                 s.add_stop("x");
                 s.add_stop(std::string(257, 'x'));
               }),
      Sampling("sampling.stop_token_ids holds 33",
               [](auto& s) {
                 for (int i = 0; i < 33; ++i) s.add_stop_token_ids(i);
               }),
      Sampling("sampling.max_tokens is 0; the least is 1", [](auto& s) { s.set_max_tokens(0); }),
      Sampling("sampling.max_tokens is -5", [](auto& s) { s.set_max_tokens(-5); }),
      Sampling("sampling.min_tokens is -1", [](auto& s) { s.set_min_tokens(-1); }),
      Sampling("sampling.min_tokens is 6; the limit is 0 to 5",
               [](auto& s) {
                 s.set_max_tokens(5);
                 s.set_min_tokens(6);
               }),
      Sampling("sampling.logprobs is 21; the limit is 0 to 20", [](auto& s) { s.set_logprobs(21); }),
      Sampling("sampling.logprobs is -1", [](auto& s) { s.set_logprobs(-1); }),
      Sampling("sampling.prompt_logprobs is 21", [](auto& s) { s.set_prompt_logprobs(21); }),
      {"resume holds 1; the limit is 2 to 2",
       [](auto& r) {
         r.mutable_sampling()->set_n(2);
         r.mutable_sampling()->set_seed(1);
         r.add_resume();
       }},
      {"sampling.seed is absent; with resume it must be set", [](auto& r) { r.add_resume(); }},
      {"resume[0].token_ids holds 3; the limit is 0 to 2",
       [](auto& r) {
         r.mutable_sampling()->set_seed(1);
         r.mutable_sampling()->set_max_tokens(2);
         r.add_resume();
         for (int i = 0; i < 3; ++i) r.mutable_resume(0)->add_token_ids(i);
       }},
      {"resume[0].prompt_logprobs is 5; the limit is 0 to 0",
       [](auto& r) {
         r.mutable_sampling()->set_seed(1);
         r.add_resume()->set_prompt_logprobs(5);
       }},
      Sampling("sampling.n is 0; the limit is 1 to 8", [](auto& s) { s.set_n(0); }),
      Sampling("sampling.n is 9", [](auto& s) { s.set_n(9); }),
  };
  for (const float value : {kNan, kInfinity, -kInfinity}) {
    bad.push_back(Sampling("sampling.temperature is", [value](auto& s) { s.set_temperature(value); }));
    bad.push_back(Sampling("sampling.top_p is", [value](auto& s) { s.set_top_p(value); }));
    bad.push_back(Sampling("sampling.min_p is", [value](auto& s) { s.set_min_p(value); }));
    bad.push_back(Sampling("sampling.repetition_penalty is", [value](auto& s) { s.set_repetition_penalty(value); }));
    bad.push_back(Sampling("sampling.presence_penalty is", [value](auto& s) { s.set_presence_penalty(value); }));
    bad.push_back(Sampling("sampling.frequency_penalty is", [value](auto& s) { s.set_frequency_penalty(value); }));
    bad.push_back(Sampling("sampling.logit_bias[3] is", [value](auto& s) { (*s.mutable_logit_bias())[3] = value; }));
  }
  return bad;
}

TEST(Validate, NamesFieldValueAndLimitOfEveryBadField) {
  for (const Bad& bad : BadRequests()) {
    GenerateRequest request = Good();
    bad.change(request);
    const absl::Status status = Validate(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
}

TEST(Validate, TakesEveryFieldAtItsBounds) {
  for (const bool high : {false, true}) {
    GenerateRequest request = Good();
    request.set_priority(high ? 100 : -100);
    request.set_request_id(std::string(high ? 128 : 0, 'x'));
    SamplingParams& sampling = *request.mutable_sampling();
    sampling.set_temperature(high ? 100 : 0);
    sampling.set_top_k(high ? std::numeric_limits<int32_t>::max() : 0);
    sampling.set_top_p(high ? 1 : std::numeric_limits<float>::denorm_min());
    sampling.set_min_p(high ? 1 : 0);
    sampling.set_repetition_penalty(high ? 100 : std::numeric_limits<float>::denorm_min());
    sampling.set_presence_penalty(high ? 100 : -100);
    sampling.set_frequency_penalty(high ? 100 : -100);
    (*sampling.mutable_logit_bias())[1] = high ? 100 : -100;
    sampling.add_stop(std::string(high ? 256 : 1, 'x'));
    sampling.set_max_tokens(high ? std::numeric_limits<int32_t>::max() : 1);
    sampling.set_min_tokens(high ? std::numeric_limits<int32_t>::max() : 0);
    sampling.set_logprobs(high ? 20 : 0);
    sampling.set_prompt_logprobs(high ? 20 : 0);
    sampling.set_n(high ? 8 : 1);
    EXPECT_TRUE(Validate(request).ok()) << Validate(request);
  }
}

TEST(Validate, ChecksTokenIdsAgainstTheVocabulary) {
  GenerateRequest request;
  request.mutable_token_ids()->add_ids(99);
  EXPECT_TRUE(ValidateTokenIds(request, 100).ok());
  EXPECT_THAT(std::string(ValidateTokenIds(request, 99).message()),
              HasSubstr("token_ids.ids[0] is 99; the limit is 0 to 98"));
  request.mutable_token_ids()->set_ids(0, -1);
  EXPECT_FALSE(ValidateTokenIds(request, 100).ok());
  request = Good();
  request.mutable_sampling()->add_stop_token_ids(100);
  EXPECT_THAT(std::string(ValidateTokenIds(request, 100).message()), HasSubstr("sampling.stop_token_ids[0] is 100"));
  request = Good();
  request.add_resume()->add_token_ids(5);
  request.mutable_resume(0)->add_token_ids(100);
  EXPECT_THAT(std::string(ValidateTokenIds(request, 100).message()), HasSubstr("resume[0].token_ids[1] is 100"));
  request = Good();
  (*request.mutable_sampling()->mutable_logit_bias())[-1] = 1;
  EXPECT_THAT(std::string(ValidateTokenIds(request, 100).message()), HasSubstr("logit_bias is -1"));
}

TEST(Validate, BoundsTheOtherRequests) {
  v1::TokenizeRequest tokenize;
  tokenize.set_text(std::string((4 << 20) + 1, 'x'));
  EXPECT_FALSE(Validate(tokenize).ok());
  v1::DetokenizeRequest detokenize;
  for (int i = 0; i <= 1 << 20; ++i) detokenize.add_token_ids(1);
  EXPECT_FALSE(Validate(detokenize).ok());
  EXPECT_FALSE(Validate(v1::RenderChatRequest()).ok());
  EXPECT_FALSE(Validate(v1::DrainWorkerRequest()).ok());
  EXPECT_FALSE(Validate(v1::CancelRequestRequest()).ok());
}

}  // namespace
}  // namespace millrace
