// What the model computes against independent implementations: greedy tokens, log-probabilities and logits.
#include "tests/worker/model/golden.h"

#include <cmath>
#include <cstdio>

#include "gtest/gtest.h"
#include "tests/fixtures.h"
#include "tests/test_stream.h"
#include "tests/worker/model/sequence_driver.h"
#include "worker/model/model_runner.h"
#include "worker/model/transformer.h"

namespace millrace {
namespace {

constexpr float kTolerance = 1e-3f;  // held by fp32 against fp64 with a factor of ten to spare
// With activations in bf16 transformers itself errs by up to 2.7 somewhere in the vocabulary, 0.4 in the mean.
constexpr float kBf16Tolerance = 1;

void ExpectGreedyPaths(const std::filesystem::path& model, const std::filesystem::path& golden, int64_t chunk) {
  auto runner = ModelRunner::Load({.model_dir = model, .kv_bytes = int64_t{2} << 30}, OpenTestStream(2));
  ASSERT_TRUE(runner.ok()) << runner.status();
  const std::vector<GoldenCase> cases = ReadGolden(golden);
  ASSERT_FALSE(cases.empty());
  SequenceDriver driver((*runner)->num_blocks(), chunk);
  for (const GoldenCase& one : cases) driver.Add(one.prompt, one.robust_tokens, 5);
  driver.RunAll(**runner);
  size_t same_paths = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(cases[i].name);
    std::vector<int32_t> robust(cases[i].greedy.begin(),
                                cases[i].greedy.begin() + static_cast<std::ptrdiff_t>(cases[i].robust_tokens));
    std::vector<int32_t> generated = driver[i].generated();
    same_paths += generated == robust ? 1 : 0;
    if (TestsRunOnGpu()) {
      robust.resize(cases[i].bf16_tokens);
      generated.resize(cases[i].bf16_tokens);
    }
    EXPECT_EQ(generated, robust);
    for (size_t position = 0; position < std::min(cases[i].top5.size(), robust.size()); ++position) {
      const TokenLogProbs& row = driver[i].logprobs[position];
      EXPECT_NEAR(row.chosen, row.top_values[0], 0);
      for (size_t n = 0; n < cases[i].top5[position].size(); ++n) {
        EXPECT_NEAR(row.top_values[n], cases[i].top5[position][n].second, TestsRunOnGpu() ? kBf16Tolerance : kTolerance)
            << "position " << position << " rank " << n;
      }
    }
  }
  std::printf("%s: %zu of %zu whole paths\n", model.filename().c_str(), same_paths, cases.size());
}

// The logits of the last prompt token, with the prompt computed in chunks.
std::vector<float> PromptLogits(const std::filesystem::path& model, const std::vector<int32_t>& prompt, int64_t chunk) {
  Stream stream = Stream::OpenCpu(2);
  const auto config = ModelConfig::Load(model);
  const auto checkpoint = Checkpoint::Open(model);
  auto kv = KvCache<float>::Allocate(*config, 64 << 20, stream);
  auto transformer = Transformer<float>::Load(*config, *checkpoint,
                                              {.rows = 512, .logit_rows = 1, .context = config->max_position}, stream);
  EXPECT_TRUE(kv.ok() && transformer.ok()) << kv.status() << transformer.status();
  SequenceDriver driver(kv->num_blocks(), chunk);
  driver.Add(prompt, 1);
  StepInput input;
  while (driver.Pack(input, 512)) {
    const Mat<const float> logits = transformer->Forward(ForwardInput::View(input), *kv, stream);
    if (logits.rows == 1) return {logits.data, logits.data + logits.cols};
    driver.Apply({});
  }
  return {};
}

void ExpectLogits(const std::filesystem::path& model, const std::filesystem::path& golden) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "the logits of a GPU stay there; its log-probabilities are compared";
  const auto config = ModelConfig::Load(model);
  const auto expected_file = SafetensorsFile::Open(golden / "logits.safetensors");
  ASSERT_TRUE(config.ok() && expected_file.ok()) << config.status() << expected_file.status();
  size_t num_compared = 0;
  for (const GoldenCase& one : ReadGolden(golden)) {
    if (one.logits.empty()) continue;
    ++num_compared;
    SCOPED_TRACE(one.name);
    std::vector<float> expected(static_cast<size_t>(config->vocab_size));
    const auto tensor = expected_file->Get(one.logits, {config->vocab_size});
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    tensor->CopyTo({expected.data(), config->vocab_size});
    const std::vector<float> logits = PromptLogits(model, one.prompt, 512);
    ASSERT_EQ(logits.size(), expected.size());
    float largest = 0;
    for (size_t i = 0; i < logits.size(); ++i) largest = std::max(largest, std::abs(logits[i] - expected[i]));
    EXPECT_LE(largest, kTolerance);
    EXPECT_EQ(PromptLogits(model, one.prompt, 7), logits) << "logits depend on the chunk size";
  }
  EXPECT_GE(num_compared, 2u);
}

// Models of tests/fixtures are always there; those of shared/golden are more, and larger.
class FixtureGolden : public testing::TestWithParam<const char*> {};
class TinyGolden : public testing::TestWithParam<const char*> {};

TEST_P(FixtureGolden, TakesEveryGreedyPathInMixedBatches) {
  ExpectGreedyPaths(Fixture(GetParam()), Fixture(GetParam()), 512);
  ExpectGreedyPaths(Fixture(GetParam()), Fixture(GetParam()), 13);
}

TEST_P(FixtureGolden, ComputesTheLogits) { ExpectLogits(Fixture(GetParam()), Fixture(GetParam())); }

TEST_P(TinyGolden, TakesEveryGreedyPathInMixedBatches) {
  MILLRACE_NEEDS_GOLDEN("tiny");
  ExpectGreedyPaths(Golden("tiny") / GetParam(), Golden("tiny") / GetParam(), 512);
  ExpectGreedyPaths(Golden("tiny") / GetParam(), Golden("tiny") / GetParam(), 13);
}

TEST_P(TinyGolden, ComputesTheLogits) {
  MILLRACE_NEEDS_GOLDEN("tiny");
  ExpectLogits(Golden("tiny") / GetParam(), Golden("tiny") / GetParam());
}

INSTANTIATE_TEST_SUITE_P(Models, FixtureGolden,
                         testing::Values("llama-tiny-3x48", "qwen2-tiny-5x16", "qwen3-tiny-6x32", "qwen3-tiny-untied"));
INSTANTIATE_TEST_SUITE_P(Models, TinyGolden,
                         testing::Values("llama-tiny", "llama-small-hd", "qwen2-tiny", "qwen3-tiny",
                                         "qwen3-tiny-untied"));

// The folder that deploy/import_model.py makes.
std::filesystem::path SmolLm2Folder() {
  const char* folder = std::getenv("MILLRACE_SMOLLM2");
  return folder != nullptr ? std::filesystem::path(folder) : SourceDir() / "build" / "models" / "smollm2";
}

TEST(SmolLm2Golden, TakesEveryRobustGreedyPath) {
  MILLRACE_NEEDS_GOLDEN("smollm2");
  if (!std::filesystem::exists(SmolLm2Folder())) GTEST_SKIP() << SmolLm2Folder() << " is absent";
  ExpectGreedyPaths(SmolLm2Folder(), Golden("smollm2"), 512);
}

TEST(SmolLm2Golden, ComputesTheLogits) {
  MILLRACE_NEEDS_GOLDEN("smollm2");
  if (!std::filesystem::exists(SmolLm2Folder())) GTEST_SKIP() << SmolLm2Folder() << " is absent";
  ExpectLogits(SmolLm2Folder(), Golden("smollm2"));
}

}  // namespace
}  // namespace millrace
