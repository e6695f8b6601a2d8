#include "worker/model/model_runner.h"

#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fixtures.h"
#include "tests/worker/model/sequence_driver.h"
#include "tests/worker/model/temp_folder.h"

namespace millrace {
namespace {

using testing::HasSubstr;

constexpr int kVocab = 320;  // of the fixtures llama-tiny-3x48 and qwen2-tiny-5x16

std::unique_ptr<ModelRunner> LoadRunner(const std::string& fixture, int threads = 2) {
  auto runner = ModelRunner::Load({.model_dir = Fixture(fixture), .kv_bytes = 16 << 20, .max_slots = 8},
                                  Stream::OpenCpu(threads));
  EXPECT_TRUE(runner.ok()) << runner.status();
  return *std::move(runner);
}

std::vector<int32_t> Prompt(int length, int seed) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < length; ++i) tokens.push_back((i * 37 + seed * 101 + i * i) % kVocab);
  return tokens;
}

SamplingRow Sampled(uint64_t seed) { return {.temperature = 0.8f, .top_k = 50, .top_p = 0.95f, .seed = seed}; }

void ExpectSameBits(const SequenceDriver::Sequence& a, const SequenceDriver::Sequence& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  ASSERT_EQ(a.logprobs.size(), b.logprobs.size());
  for (size_t i = 0; i < a.logprobs.size(); ++i) {
    EXPECT_EQ(a.logprobs[i].top_tokens, b.logprobs[i].top_tokens);
    EXPECT_EQ(std::memcmp(a.logprobs[i].top_values.data(), b.logprobs[i].top_values.data(),
                          a.logprobs[i].top_values.size() * sizeof(float)),
              0);
    EXPECT_EQ(std::memcmp(&a.logprobs[i].chosen, &b.logprobs[i].chosen, sizeof(float)), 0);
  }
}

class Exactness : public testing::TestWithParam<const char*> {};

// Every token's log-probability, bit for bit: alone or in company, whatever the chunks, blocks and threads.
TEST_P(Exactness, ASequenceDoesNotDependOnItsCompany) {
  const auto runner = LoadRunner(GetParam());
  const std::vector<int> lengths = {1, 31, 32, 33, 100, 150};
  std::vector<SequenceDriver> alone;
  for (size_t i = 0; i < lengths.size(); ++i) {
    alone.emplace_back(runner->num_blocks(), 512);
    alone[i].Add(Prompt(lengths[i], static_cast<int>(i)), 20, kVocab, i % 2 == 0 ? SamplingRow{} : Sampled(i));
    alone[i].RunAll(*runner);
  }
  for (const int64_t chunk : {1, 7, 64, 512}) {
    for (const int threads : {1, 2}) {
      SCOPED_TRACE(testing::Message() << "chunk " << chunk << ", threads " << threads);
      const auto other = LoadRunner(GetParam(), threads);
      SequenceDriver together(other->num_blocks(), chunk, static_cast<unsigned>(chunk));
      for (size_t i = 0; i < lengths.size(); ++i) {
        together.Add(Prompt(lengths[i], static_cast<int>(i)), 20, kVocab, i % 2 == 0 ? SamplingRow{} : Sampled(i));
      }
      together.RunAll(*other);
      for (size_t i = 0; i < lengths.size(); ++i) ExpectSameBits(together[i], alone[i][0]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Exactness, testing::Values("llama-tiny-3x48", "qwen2-tiny-5x16"));

TEST(ModelRunner, GivesTheLogProbabilityOfATargetWithoutSampling) {
  const auto runner = LoadRunner("llama-tiny-3x48");
  SequenceDriver driver(runner->num_blocks(), 512);
  driver.Add(Prompt(40, 1), 1, kVocab);
  StepInput input;
  StepOutput output;
  ASSERT_TRUE(driver.Pack(input, 2048));
  runner->Run(input, output);
  const TokenLogProbs sampled = output.logprobs[0];
  double sum = 0;
  for (const float value : sampled.top_values) sum += std::exp(value);
  EXPECT_NEAR(sum, 1, 1e-4);

  // Rows 38 and 39 with targets around the sampled row 39: the order of the kinds does not matter.
  input.logit_rows = {38, 39, 39, 39};
  input.sampling.resize(4, input.sampling[0]);
  input.slots = {-1, -1, -1, -1};
  input.target = {7, -1, sampled.top_tokens[3], 9};
  input.num_logprobs = {0, 2, 0, -1};
  input.is_guess.assign(4, false);
  const int32_t greedy = output.tokens[0];
  runner->Run(input, output);
  EXPECT_THAT(output.tokens, testing::ElementsAre(7, greedy, sampled.top_tokens[3], 9));
  EXPECT_EQ(output.logprobs[1].top_tokens, std::vector(sampled.top_tokens.begin(), sampled.top_tokens.begin() + 2));
  EXPECT_EQ(output.logprobs[2].chosen, sampled.top_values[3]);
  EXPECT_TRUE(output.logprobs[2].top_tokens.empty());
}

TEST(ModelRunner, AStepWithoutLogitRowsFillsTheCacheOnly) {
  const auto runner = LoadRunner("qwen2-tiny-5x16");
  SequenceDriver driver(runner->num_blocks(), 16);
  driver.Add(Prompt(40, 1), 1);
  StepInput input;
  StepOutput output;
  ASSERT_TRUE(driver.Pack(input, 2048));
  runner->Run(input, output);
  EXPECT_TRUE(output.tokens.empty());
  EXPECT_TRUE(output.logprobs.empty());
}

// A slot's history: what has been in it before Reset does not count.
TEST(ModelRunner, PenaltiesSeeTheSlotsOwnHistoryAlone) {
  const auto runner = LoadRunner("llama-tiny-3x48");
  const std::vector<int32_t> prompt = Prompt(40, 3);
  const Vec<const int32_t> prompt_view = {prompt.data(), 40};
  StepInput input;
  StepOutput output;
  const auto next = [&](int history) {
    SequenceDriver driver(runner->num_blocks(), 512);
    driver.Add(prompt, 1, -1, {.frequency_penalty = 1000, .history = history});
    driver.Pack(input, 2048);
    runner->Run(input, output);
    return output.tokens[0];
  };
  const int32_t greedy = next(-1);
  runner->ResetHistory(2, prompt_view, {});
  EXPECT_EQ(next(2), greedy) << "tokens of the prompt are not output";
  EXPECT_NE(next(2), greedy) << "what was sampled counts";
  EXPECT_EQ(next(1), greedy) << "another slot";
  runner->ResetHistory(2, prompt_view, {});
  EXPECT_EQ(next(2), greedy);
  runner->ResetHistory(2, prompt_view, {&greedy, 1});
  EXPECT_NE(next(2), greedy) << "a moved sequence brings its output";
}

TEST(ModelRunner, RefusesOptionsByNameAndLimit) {
  const auto complaint = [](ModelRunnerOptions options) {
    return std::string(ModelRunner::Load(options, Stream::OpenCpu(1)).status().message());
  };
  const std::filesystem::path folder = Fixture("qwen2-tiny-5x16");
  EXPECT_THAT(complaint({.model_dir = folder, .kv_bytes = 100}),
              HasSubstr("the KV pool has 100 bytes; one block needs 40960"));
  EXPECT_THAT(complaint({.model_dir = folder, .kv_bytes = -1}), HasSubstr("-1 bytes"));
  EXPECT_THAT(complaint({.model_dir = folder, .kv_bytes = 1 << 20, .max_slots = 0}), HasSubstr("max_slots is 0"));
  EXPECT_THAT(complaint({.model_dir = folder, .kv_bytes = 1 << 20, .max_rows = 1 << 30}),
              HasSubstr("max_rows is 1073741824"));
  EXPECT_THAT(complaint({.model_dir = folder / "absent", .kv_bytes = 1 << 20}), HasSubstr("config.json is not a file"));
}

TEST(ModelRunner, RefusesAMixtureOfExperts) {
  MILLRACE_NEEDS_GOLDEN("tiny/qwen3-moe-tiny");
  const auto runner =
      ModelRunner::Load({.model_dir = Golden("tiny/qwen3-moe-tiny"), .kv_bytes = 1 << 24}, Stream::OpenCpu(1));
  EXPECT_THAT(std::string(runner.status().message()), HasSubstr("Qwen3MoeForCausalLM"));
}

// A config may claim any size within its limits; the checkpoint is proven before memory is taken for it.
TEST(ModelRunner, AConfigLargerThanItsCheckpointIsRefused) {
  const TempFolder folder;
  folder.CopyFrom(Fixture("qwen2-tiny-5x16"));
  std::string config = ReadBytes(folder.path() / "config.json");
  const std::string from = "\"intermediate_size\": 112";
  ASSERT_NE(config.find(from), std::string::npos);
  folder.Write("config.json", config.replace(config.find(from), from.size(), "\"intermediate_size\": 262144"));
  const auto runner = ModelRunner::Load({.model_dir = folder.path(), .kv_bytes = 1 << 24}, Stream::OpenCpu(1));
  EXPECT_THAT(std::string(runner.status().message()), HasSubstr("needs [262144, 80]"));
}

TEST(ModelRunnerDeathTest, AnInconsistentStepIsABrokenInvariant) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto runner = LoadRunner("qwen2-tiny-5x16", 1);
  StepInput input;
  StepOutput output;
  const auto run_with = [&](auto spoil) {
    SequenceDriver driver(runner->num_blocks(), 512);
    driver.Add(Prompt(40, 1), 1);
    driver.Pack(input, 2048);
    spoil(input);
    runner->Run(input, output);
  };
  EXPECT_DEATH(run_with([](StepInput& step) { step.tokens[3] = kVocab; }), "tokens are in the vocabulary");
  EXPECT_DEATH(run_with([](StepInput& step) { step.kv_slots[3] = 1 << 30; }), "kv slots are in the pool");
  EXPECT_DEATH(run_with([](StepInput& step) { step.block_table[0] = -1; }), "block ids are in the pool");
  EXPECT_DEATH(run_with([](StepInput& step) { step.context_len[0] = 65; }), "contexts are within their block tables");
  EXPECT_DEATH(run_with([](StepInput& step) { step.positions[0] = 256; }), "positions are within the context");
  EXPECT_DEATH(run_with([](StepInput& step) { step.logit_rows[0] = 40; }), "logit rows are rows of the step");
}

}  // namespace
}  // namespace millrace
