#include "worker/engine/edit_validator.h"

#include <cmath>
#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/edits.h"

namespace millrace::testing {
namespace {

using ::testing::HasSubstr;
using worker::v1::Admit;
using worker::v1::Edit;

std::string Message(const Edit& edit) { return std::string(ValidateEdit(edit, SmallLimits()).message()); }

std::string Changed(const std::function<void(Admit&)>& change) {
  Admit admit = MakeAdmit(0, Prompt(40), Blocks(0, 2), 60);
  change(admit);
  return Message(MakeEdit(1, {admit}));
}

TEST(EditValidator, TakesWhatFits) {
  Edit edit = MakeEdit(1, {MakeAdmit(7, Prompt(512 - 1), Blocks(48, 16), 512)}, {0, 7});
  AddExtend(edit, 7, {});
  EXPECT_EQ(Message(edit), "");
}

TEST(EditValidator, NamesFieldValueAndLimit) {
  EXPECT_EQ(Changed([](Admit& a) { a.set_slot(8); }), "admit[0].slot is 8; the limits are 0 and 7");
  EXPECT_EQ(Changed([](Admit& a) { a.set_token_ids(3, 100); }),
            "admit[0].token_ids[3] is 100; the limits are 0 and 99");
  EXPECT_EQ(Changed([](Admit& a) { a.set_block_table(1, 64); }),
            "admit[0].block_table[1] is 64; the limits are 0 and 63");
  EXPECT_EQ(Changed([](Admit& a) { a.set_max_length(513); }), "admit[0].max_length is 513; the limits are 41 and 512");
}

TEST(EditValidator, BoundsEveryNumberOfAnAdmission) {
  EXPECT_THAT(Changed([](Admit& a) { a.set_token_ids(0, -1); }), HasSubstr("token_ids[0] is -1"));
  EXPECT_THAT(Changed([](Admit& a) { a.clear_token_ids(); }), HasSubstr("token_ids: their number is 0"));
  EXPECT_THAT(Changed([](Admit& a) { a.set_num_cached_tokens(16); }), HasSubstr("multiple of 32"));
  EXPECT_THAT(Changed([](Admit& a) { a.set_num_cached_tokens(UINT32_MAX - 31); }),
              HasSubstr("num_cached_tokens is 4294967264"));
  EXPECT_THAT(Changed([](Admit& a) { a.set_num_cached_tokens(32); }),
              HasSubstr("block_table: its number of blocks is 2"));
  EXPECT_THAT(Changed([](Admit& a) {
                for (uint32_t i = 2; i < 17; ++i) a.add_block_table(i);
              }),
              HasSubstr("block_table: its number of blocks is 17"));
  EXPECT_THAT(Changed([](Admit& a) { a.set_max_length(40); }), HasSubstr("max_length is 40"));
  EXPECT_THAT(Changed([](Admit& a) { a.set_min_length(61); }), HasSubstr("min_length is 61"));
  EXPECT_THAT(Changed([](Admit& a) { a.set_num_prompt_tokens(0); }), HasSubstr("num_prompt_tokens is 0"));
  EXPECT_THAT(Changed([](Admit& a) { a.set_num_prompt_tokens(41); }), HasSubstr("num_prompt_tokens is 41"));
  EXPECT_THAT(Changed([](Admit& a) { a.set_filling_slot(8); }), HasSubstr("filling_slot is 8"));
  EXPECT_THAT(Changed([](Admit& a) { a.set_filling_slot(0); }), HasSubstr("filling_slot is 0"));
  EXPECT_THAT(Changed([](Admit& a) {
                for (int i = 0; i < 65; ++i) a.add_stop_token_ids(i);
              }),
              HasSubstr("stop_token_ids: their number is 65"));
  EXPECT_THAT(Changed([](Admit& a) { a.add_cached_token_ids(1); }), HasSubstr("cached_token_ids: their number is 1"));
}

TEST(EditValidator, KeepsSamplingFiniteAndInRange) {
  const auto changed = [](const std::function<void(worker::v1::Sampling&)>& change) {
    return Changed([&](Admit& a) { change(*a.mutable_sampling()); });
  };
  EXPECT_THAT(changed([](auto& s) { s.set_temperature(NAN); }), HasSubstr("temperature is nan"));
  EXPECT_THAT(changed([](auto& s) { s.set_temperature(INFINITY); }), HasSubstr("temperature is inf"));
  EXPECT_THAT(changed([](auto& s) { s.set_top_k(1u << 31); }), HasSubstr("top_k is 2147483648"));
  EXPECT_THAT(changed([](auto& s) { s.set_top_p(0); }), HasSubstr("top_p is 0"));
  EXPECT_THAT(changed([](auto& s) { s.set_min_p(1.5f); }), HasSubstr("min_p is 1.5"));
  EXPECT_THAT(changed([](auto& s) { s.set_repetition_penalty(0); }), HasSubstr("repetition_penalty is 0"));
  EXPECT_THAT(changed([](auto& s) { s.set_presence_penalty(-INFINITY); }), HasSubstr("presence_penalty is -inf"));
  EXPECT_THAT(changed([](auto& s) { s.set_frequency_penalty(NAN); }), HasSubstr("frequency_penalty is nan"));
  EXPECT_THAT(changed([](auto& s) { s.set_logprobs(21); }), HasSubstr("logprobs is 21"));
  EXPECT_THAT(changed([](auto& s) { s.set_prompt_logprobs(21); }), HasSubstr("prompt_logprobs is 21"));
  EXPECT_THAT(changed([](auto& s) { s.add_bias_token_ids(1); }), HasSubstr("bias_values: their number is 0"));
  const auto biased = [](auto& s, int32_t token, float value) {
    s.add_bias_token_ids(token);
    s.add_bias_values(value);
  };
  EXPECT_THAT(changed([&](auto& s) { biased(s, 100, 1); }), HasSubstr("bias_token_ids[0] is 100"));
  EXPECT_THAT(changed([&](auto& s) { biased(s, 1, NAN); }), HasSubstr("bias_values holds nan"));
  EXPECT_THAT(changed([&](auto& s) { biased(s, 1, 1), biased(s, 1, 2); }), HasSubstr("has 1 twice"));
  EXPECT_EQ(changed([&](auto& s) { biased(s, 1, -INFINITY); }), "");
}

TEST(EditValidator, WantsCachedTokensWherePenaltiesNeedThem) {
  Admit admit = MakeAdmit(0, Prompt(40), Blocks(0, 2), 60, 32);
  EXPECT_EQ(Message(MakeEdit(1, {admit})), "");
  admit.mutable_sampling()->set_repetition_penalty(1.1f);
  EXPECT_THAT(Message(MakeEdit(1, {admit})),
              HasSubstr("cached_token_ids: their number is 0; the limits are 32 and 32"));
  admit.mutable_sampling()->set_repetition_penalty(1);
  admit.mutable_sampling()->set_presence_penalty(1);
  EXPECT_EQ(Message(MakeEdit(1, {admit})), "");  // the cached ones are all of the prompt
  admit.set_num_prompt_tokens(20);
  EXPECT_THAT(Message(MakeEdit(1, {admit})), HasSubstr("cached_token_ids: their number is 0"));
}

TEST(EditValidator, PromptLogprobsUseNoCachedPrefix) {
  Admit admit = MakeAdmit(0, Prompt(40), Blocks(0, 2), 60, 32);
  admit.mutable_sampling()->set_prompt_logprobs(1);
  EXPECT_THAT(Message(MakeEdit(1, {admit})), HasSubstr("num_cached_tokens is 32"));
}

TEST(EditValidator, BoundsReleasesExtensionsAndRanks) {
  EXPECT_EQ(Message(MakeEdit(1, {}, {8})), "release[0] is 8; the limits are 0 and 7");
  Edit edit = MakeEdit(1);
  AddExtend(edit, 8, {0});
  EXPECT_EQ(Message(edit), "extend[0].slot is 8; the limits are 0 and 7");
  edit = MakeEdit(1);
  AddExtend(edit, 0, {64});
  EXPECT_EQ(Message(edit), "extend[0].block_table[0] is 64; the limits are 0 and 63");
  edit = MakeEdit(1);
  edit.add_rank()->set_slot(8);
  EXPECT_EQ(Message(edit), "rank[0].slot is 8; the limits are 0 and 7");
}

}  // namespace
}  // namespace millrace::testing
