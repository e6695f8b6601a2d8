#include <fstream>

#include "kernels/gumbel.h"
#include "nlohmann/json.hpp"
#include "tests/fixtures.h"
#include "tests/kernels/arrays.h"

namespace millrace {
namespace {

std::vector<double> ProbabilitiesOf(const std::vector<float>& processed) {
  const double max = *std::max_element(processed.begin(), processed.end());
  std::vector<double> p;
  double sum = 0;
  for (const float v : processed) sum += p.emplace_back(std::exp(v - max));
  for (double& v : p) v /= sum;
  return p;
}

std::vector<float> Process(const std::vector<float>& logits, SamplingRow row, const std::vector<LogitBias>& biases = {},
                           std::vector<TokenCount> history = {}) {
  Stream stream = TestStream(1);
  const auto vocab = static_cast<int64_t>(logits.size());
  row.bias_end = static_cast<int32_t>(biases.size());
  row.history = history.empty() ? -1 : 0;
  std::vector<float> out(logits.size());
  ProcessLogits({out.data(), 1, vocab}, {logits.data(), 1, vocab}, {&row, 1}, View(biases),
                {history.data(), history.empty() ? 0 : 1, vocab}, stream);
  return out;
}

int32_t SampleOne(const std::vector<float>& logits, SamplingRow row, const std::vector<LogitBias>& biases = {}) {
  Stream stream = TestStream(1);
  row.bias_end = static_cast<int32_t>(biases.size());
  int32_t token = 0;
  Sample({&token, 1}, {logits.data(), 1, static_cast<int64_t>(logits.size())}, {&row, 1}, View(biases), {}, stream);
  return token;
}

TEST(ProcessLogits, GivesTheProbabilitiesOfTransformers) {
  MILLRACE_NEEDS_GOLDEN("sampling/logits_processors.json");
  std::ifstream file(Golden("sampling/logits_processors.json"));
  const auto golden = nlohmann::json::parse(file);
  for (const auto& test : golden["cases"]) {
    SCOPED_TRACE(test["name"].get<std::string>());
    const auto logits = test["logits"].get<std::vector<float>>();
    const auto& params = test["params"];
    SamplingRow row;
    row.temperature = params["temperature"];
    row.top_k = params["top_k"];
    row.top_p = params["top_p"];
    row.min_p = params["min_p"];
    row.repetition_penalty = params["repetition_penalty"];
    row.presence_penalty = params["presence_penalty"];
    row.frequency_penalty = params["frequency_penalty"];
    std::vector<TokenCount> history(logits.size());
    for (const int token : test["prompt"]) history[token] |= kPromptToken;
    for (const int token : test["output"]) ++history[token];
    std::vector<LogitBias> biases;
    for (const auto& [token, value] : params["logit_bias"].items()) biases.push_back({std::stoi(token), value});
    const auto p = ProbabilitiesOf(Process(logits, row, biases, history));
    const auto expected = test["probs"].get<std::vector<double>>();
    if (test["edge_distance"].get<double>() < 1e-4) continue;
    for (size_t v = 0; v < p.size(); ++v) ASSERT_NEAR(p[v], expected[v], 1e-5) << v;
  }
}

TEST(ProcessLogits, KeepsTiesWithTheKth) {
  SamplingRow row;
  row.temperature = 1;
  row.top_k = 2;
  const auto out = Process({1, 3, 2, 2, 0, 2}, row);
  EXPECT_EQ(std::count(out.begin(), out.end(), -INFINITY), 2);
  EXPECT_EQ(out[0], -INFINITY);
  EXPECT_EQ(out[4], -INFINITY);
}

TEST(ProcessLogits, KeepsTheLowestIdsOfEqualsAtTheEdgeOfTopP) {
  SamplingRow row;
  row.temperature = 1;
  row.top_p = 0.5f;
  const auto out = Process({0, 0, 0, 0}, row);
  EXPECT_EQ(ProbabilitiesOf(out), (std::vector<double>{0.5, 0.5, 0, 0}));
  row.top_p = 1e-6f;
  EXPECT_EQ(ProbabilitiesOf(Process({0, 1, 1, 0}, row)), (std::vector<double>{0, 1, 0, 0}));
}

TEST(ProcessLogits, FiltersLikeASortOnRandomRows) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const auto logits = Array<float>::Random(1, 500, seed, 2 + seed % 3);
    SamplingRow row;
    row.temperature = 0.8f;
    row.top_k = seed % 2 == 0 ? static_cast<int32_t>(1 + seed) : 0;
    row.top_p = 0.05f + 0.9f * static_cast<float>(seed) / 200;
    std::vector<float> sorted = logits.values;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    if (row.top_k > 0) sorted.resize(row.top_k);
    double total = 0, above = 0;
    for (const float v : sorted) total += std::exp((static_cast<double>(v) - sorted[0]) / row.temperature);
    size_t kept = 0;
    while (kept < sorted.size() && above < row.top_p * total) {
      above += std::exp((static_cast<double>(sorted[kept++]) - sorted[0]) / row.temperature);
    }
    const auto out = Process(logits.values, row);
    ASSERT_EQ(static_cast<size_t>(std::count(out.begin(), out.end(), -INFINITY)), 500 - kept) << "seed " << seed;
    for (int v = 0; v < 500; ++v)
      ASSERT_EQ(out[v] != -INFINITY, logits.values[v] >= sorted[kept - 1]) << "seed " << seed;
  }
}

TEST(Sample, GreedyTakesTheLowestIdOfTheLargest) {
  EXPECT_EQ(SampleOne({1, 5, 5, 2}, {}), 1);
  EXPECT_EQ(SampleOne({1, 5, 5, 2}, {}, {{1, -1.0f}}), 2);
}

TEST(Sample, MarksNanInfinityAndNothingAllowed) {
  for (const float temperature : {0.0f, 1.0f}) {
    SamplingRow row;
    row.temperature = temperature;
    EXPECT_EQ(SampleOne({0, NAN, 0}, row), -1);
    EXPECT_EQ(SampleOne({0, INFINITY, 0}, row), -1);
    EXPECT_EQ(SampleOne({0, -INFINITY, 0}, row), -1);
    EXPECT_EQ(SampleOne({0, 1}, row, {{0, -INFINITY}, {1, -INFINITY}}), -1);
    EXPECT_EQ(SampleOne({0, 1}, row, {{1, -INFINITY}}), 0);
  }
}

TEST(Sample, SurvivesTheSmallestTemperature) {
  SamplingRow row;
  row.temperature = std::numeric_limits<float>::min();
  row.top_p = 0.9f;
  EXPECT_EQ(SampleOne({-1e30f, 3e30f, 1}, row), 1);
}

TEST(Sample, IsTheArgmaxOfProcessedLogitsAndNoise) {
  constexpr int64_t kVocab = 1003;
  Stream stream = TestStream(2);
  for (uint32_t seed = 0; seed < 100; ++seed) {
    const auto logits = Array<float>::Random(1, kVocab, seed, seed % 5);
    SamplingRow row;
    row.temperature = 1;
    row.top_p = seed % 3 == 0 ? 0.8f : 1;
    row.seed = uint64_t{seed} << 31;
    row.position = int64_t{seed} << 29;
    const auto z = Process(logits.values, row);
    int32_t best = -1;
    double best_score = 0;
    for (int32_t v = 0; v < kVocab; ++v) {
      if (z[v] == -INFINITY) continue;
      uint32_t words[64];
      cpu::KernelsFor(cpu::Isa::kPortable).philox(words, row.seed, row.position, static_cast<uint64_t>(v / 4));
      const double score = z[v] + GumbelNoise(words[v % 4]);
      if (best < 0 || score > best_score) best = v, best_score = score;
    }
    ASSERT_EQ(SampleOne(logits.values, row), best) << "seed " << seed;
  }
}

// Chi-squared with V - 1 degrees of freedom, over a million draws with fixed seeds. The threshold is the quantile of a
// p-value of 1e-4 (Wilson-Hilferty), so a correct sampler would fail one choice of seeds in ten thousand, and these do
// not change.
TEST(Sample, DrawsTheDistributionOverPositionsAndSeeds) {
  constexpr int64_t kVocab = 13, kRows = 1000, kCalls = 1000;
  const auto one = Array<float>::Random(1, kVocab, 3, 1.5);
  Array<float> logits(kRows, kVocab);
  for (int64_t r = 0; r < kRows; ++r) std::copy(one.values.begin(), one.values.end(), logits.mat().row(r));
  Stream stream = TestStream(2);
  std::vector<SamplingRow> rows(kRows);
  std::vector<int32_t> tokens(kRows);
  SamplingRow plain;
  plain.temperature = 0.7f;
  const auto p = ProbabilitiesOf(Process(one.values, plain));
  for (const bool vary_seed : {false, true}) {
    std::vector<double> counts(kVocab);
    for (int64_t call = 0; call < kCalls; ++call) {
      for (int64_t r = 0; r < kRows; ++r) {
        rows[r] = plain;
        (vary_seed ? rows[r].seed : reinterpret_cast<uint64_t&>(rows[r].position)) =
            static_cast<uint64_t>(call * kRows + r);
      }
      Sample({tokens.data(), kRows}, logits.view(), View(rows), {}, {}, stream);
      for (const int32_t token : tokens) ++counts[token];
    }
    double chi = 0;
    for (int64_t v = 0; v < kVocab; ++v) {
      const double expected = p[v] * kRows * kCalls;
      chi += (counts[v] - expected) * (counts[v] - expected) / expected;
    }
    const double df = kVocab - 1, a = 2 / (9 * df), quantile = 3.719;
    EXPECT_LT(chi, df * std::pow(1 - a + quantile * std::sqrt(a), 3)) << (vary_seed ? "seeds" : "positions");
  }
}

TEST(CountTokens, CountsWhereThereIsAHistoryAndAToken) {
  Stream stream = TestStream(1);
  std::vector<TokenCount> history{0, kPromptToken, 2, 0, 0, kPromptToken | 7};
  std::vector<SamplingRow> rows(5);
  const int32_t histories[] = {1, 0, -1, 0, 1};
  for (size_t r = 0; r < 5; ++r) rows[r].history = histories[r];
  const std::vector<int32_t> tokens{2, 1, 2, -1, 2};
  CountTokens({history.data(), 2, 3}, View(rows), View(tokens), stream);
  EXPECT_EQ(history, (std::vector<TokenCount>{0, kPromptToken | 1, 2, 0, 0, kPromptToken | 9}));
  CountTokens({nullptr, 0, 0}, View(rows).Slice(2, 1), View(tokens).Slice(2, 1), stream);
}

// The vectors published with Random123 for philox4x32 with ten rounds.
TEST(Philox, MatchesItsKnownAnswers) {
  for (const cpu::Isa isa : SupportedIsas()) {
    const auto words = [&](uint64_t key, uint64_t high, uint64_t low) {
      uint32_t of16[64];
      cpu::KernelsFor(isa).philox(of16, key, static_cast<int64_t>(high), low);
      return std::vector<uint32_t>(of16, of16 + 4);
    };
    EXPECT_EQ(words(0, 0, 0), (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    EXPECT_EQ(words(~0ull, ~0ull, ~0ull), (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    EXPECT_EQ(words(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
              (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  }
}

TEST(GumbelNoise, IsFiniteGrowsAndAgreesWithTheLibrary) {
  EXPECT_LT(GumbelNoise(~0u), kLargestGumbelNoise);
  EXPECT_GT(GumbelNoise(0), -3.14);
  double last = -INFINITY;
  for (uint64_t word = 0; word < (uint64_t{1} << 32); word += 65537) {
    const double g = GumbelNoise(static_cast<uint32_t>(word)), u = (static_cast<double>(word) + 0.5) / 0x1p32;
    ASSERT_GT(g, last);
    ASSERT_NEAR(g, -std::log(-std::log(u)), 1e-13 * std::max(1.0, 1 / -std::log(u)));
    last = g;
  }
  for (const double x : {1e-300, 1e-9, 0.5, 0.999999, 1.0, 1.5, 2.0, 1e9, 1e300}) {
    EXPECT_NEAR(NaturalLog(x), std::log(x), 4e-16 * std::abs(std::log(x))) << x;
  }
}

TEST(LogProbs, AreTheLogSoftmaxAndItsBest) {
  Stream stream = TestStream(2);
  const auto logits = Array<float>::Random(3, 989, 1, 4);
  const std::vector<int32_t> tokens = {0, 988, -1};
  std::vector<float> chosen(3);
  Array<float> values(3, 20);
  Array<int32_t> ids(3, 20);
  LogProbs({chosen.data(), 3}, values.mat(), ids.mat(), logits.view(), View(tokens), stream);
  for (int r = 0; r < 3; ++r) {
    double sum = 0;
    for (int v = 0; v < 989; ++v) sum += std::exp(logits.at(r, v));
    if (tokens[r] >= 0) {
      EXPECT_NEAR(chosen[r], logits.at(r, tokens[r]) - std::log(sum), 1e-5);
    }
    std::vector<int32_t> order(989);
    for (int v = 0; v < 989; ++v) order[v] = v;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits.at(r, a) > logits.at(r, b); });
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(ids.view().row(r)[i], order[i]);
      EXPECT_NEAR(values.at(r, i), logits.at(r, order[i]) - std::log(sum), 1e-5);
    }
  }
  EXPECT_EQ(chosen[2], -INFINITY);
}

TEST(LogProbs, BreakTiesByTheLowestId) {
  Stream stream = TestStream(1);
  const std::vector<float> logits = {1, 2, 2, 2, 0};
  const std::vector<int32_t> tokens = {1};
  float chosen;
  std::vector<float> values(3);
  std::vector<int32_t> ids(3);
  LogProbs({&chosen, 1}, {values.data(), 1, 3}, {ids.data(), 1, 3}, {logits.data(), 1, 5}, View(tokens), stream);
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 2, 3}));
  LogProbs({&chosen, 1}, {nullptr, 1, 0}, {nullptr, 1, 0}, {logits.data(), 1, 5}, View(tokens), stream);
  EXPECT_EQ(chosen, values[0]);
}

}  // namespace
}  // namespace millrace
