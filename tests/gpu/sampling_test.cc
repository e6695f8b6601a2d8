#include <algorithm>
#include <limits>

#include "tests/gpu/device_arrays.h"

namespace millrace {
namespace {

// Rows with every kind of parameter, drawn from a seed.
struct Batch {
  Array<float> logits;
  std::vector<SamplingRow> rows;
  std::vector<LogitBias> biases;
  Array<TokenCount> history;

  Batch(int64_t count, int64_t vocab, uint32_t seed, double deviation)
      : logits(Array<float>::Random(count, vocab, seed, deviation)), history(3, vocab) {
    std::mt19937 bits(seed);
    const auto one_in = [&](uint32_t n) { return bits() % n == 0; };
    const auto unit = [&] { return static_cast<float>(bits() % 1000 + 1) / 1001; };
    for (TokenCount& seen : history.values) {
      if (one_in(7)) seen = (one_in(2) ? kPromptToken : 0) | (one_in(2) ? bits() % 5 : 0);
    }
    if (seed % 2 == 0) {  // ties
      for (float& x : logits.values) x = std::round(x * 4) / 4;
    }
    for (int64_t r = 0; r < count; ++r) {
      SamplingRow row;
      row.temperature = one_in(6) ? 0 : 0.3f + 1.5f * unit();
      if (one_in(3)) row.top_k = static_cast<int32_t>(1 + bits() % static_cast<uint32_t>(one_in(2) ? 50 : vocab));
      if (one_in(2)) row.top_p = unit();
      if (one_in(3)) row.min_p = unit() * 0.3f;
      if (one_in(2)) {
        row.history = static_cast<int32_t>(bits() % 3);
        row.repetition_penalty = 0.7f + unit();
        row.presence_penalty = unit() - 0.5f;
        row.frequency_penalty = unit() - 0.5f;
      }
      row.bias_begin = static_cast<int32_t>(biases.size());
      if (one_in(3)) {
        for (int32_t t = 0; t < 5 && t < vocab; ++t) biases.push_back({t, one_in(3) ? -INFINITY : 4 * unit()});
      }
      row.bias_end = static_cast<int32_t>(biases.size());
      row.seed = bits();
      row.position = r * 1000;
      rows.push_back(row);
    }
  }
};

void ExpectSame(int64_t count, int64_t vocab, uint32_t seed, double deviation) {
  SCOPED_TRACE(testing::Message() << count << " rows of " << vocab << ", seed " << seed << ", deviation " << deviation);
  Batch b(count, vocab, seed, deviation);
  if (count > 2) b.logits.mat().row(1)[vocab / 2] = NAN;
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  Array<float> processed(count, vocab);
  Sample({tokens.data(), count}, b.logits.view(), View(b.rows), View(b.biases), b.history.view(), CpuStream());
  const OnGpu<float> logits(b.logits), gprocessed(count, vocab);
  const OnGpu<SamplingRow> rows(b.rows);
  const OnGpu<LogitBias> biases(b.biases);
  const OnGpu<TokenCount> history(b.history);
  const OnGpu<int32_t> gtokens(1, count);
  Sample(gtokens.vec(), logits.mat(), rows.vec(), biases.vec(), history.mat(), GpuStream());
  EXPECT_EQ(gtokens.Host().values, tokens);
  if (count > 2) {
    b.logits.mat().row(1)[vocab / 2] = 0;
    b.rows[1].temperature = 0;
  }
  const OnGpu<float> finite(b.logits);
  ProcessLogits(processed.mat(), b.logits.view(), View(b.rows), View(b.biases), b.history.view(), CpuStream());
  ProcessLogits(gprocessed.mat(), finite.mat(), OnGpu<SamplingRow>(b.rows).vec(), biases.vec(), history.mat(),
                GpuStream());
  const Array<float> result = gprocessed.Host();
  for (int64_t r = 0; r < count; ++r) {
    EXPECT_EQ(0, std::memcmp(result.view().row(r), processed.view().row(r), static_cast<size_t>(vocab) * 4))
        << "row " << r;
  }
}

TEST(GpuSampling, GivesTheCpusTokens) {
  MILLRACE_NEEDS_GPU();
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    ExpectSame(64, 1000, seed, 3);
    ExpectSame(7, 7, seed, 1);
    ExpectSame(33, 4097, seed, 0.1);
  }
  ExpectSame(16, 151936, 11, 3);
  ExpectSame(16, 151936, 12, 3);
  ExpectSame(150, 49152, 13, 2);
}

std::vector<int32_t> TokensOf(Mat<const float> logits, const std::vector<SamplingRow>& rows) {
  const OnGpu<int32_t> tokens(1, logits.rows);
  Sample(tokens.vec(), logits, OnGpu<SamplingRow>(rows).vec().Slice(0, logits.rows), {}, {}, GpuStream());
  return tokens.Host().values;
}

std::vector<int32_t> CpuTokensOf(const Array<float>& logits, const std::vector<SamplingRow>& rows) {
  std::vector<int32_t> tokens(rows.size());
  Sample({tokens.data(), logits.rows}, logits.view(), View(rows), {}, {}, CpuStream());
  return tokens;
}

TEST(GpuSampling, FindsTheWinnerOnAnyScale) {
  MILLRACE_NEEDS_GPU();
  std::vector<SamplingRow> rows;
  for (const float temperature : {0.0f, std::numeric_limits<float>::min(), 1e-6f, 0.01f, 0.6f, 1.0f, 100.0f, 1e30f}) {
    SamplingRow row;
    row.temperature = temperature;
    row.seed = rows.size();
    rows.push_back(row);
  }
  for (const double deviation : {0.0, 1e-3, 1.0, 30.0, 1e8, 1e37}) {
    for (const int64_t vocab : {1, 5, 4096, 4097, 8190, 40000}) {
      SCOPED_TRACE(testing::Message() << "deviation " << deviation << ", " << vocab << " tokens");
      const auto logits = Array<float>::Random(static_cast<int64_t>(rows.size()), vocab, 7, deviation);
      EXPECT_EQ(TokensOf(OnGpu<float>(logits).mat(), rows), CpuTokensOf(logits, rows));
    }
  }
}

TEST(GpuSampling, FiltersAsTheCpuDoes) {
  MILLRACE_NEEDS_GPU();
  std::vector<SamplingRow> rows;
  const auto add = [&](int32_t top_k, float top_p, float min_p) {
    for (int i = 0; i < 3; ++i) {
      SamplingRow row;
      row.temperature = i == 0 ? 0.6f : 1;
      row.top_k = top_k;
      row.top_p = top_p;
      row.min_p = min_p;
      row.seed = rows.size();
      rows.push_back(row);
    }
  };
  for (const int32_t top_k : {1, 20, 1000, 5000, 39999}) {
    add(top_k, 1, 0);
    add(top_k, 0.8f, 0);
    add(top_k, 0.8f, 0.01f);
  }
  for (const float top_p : {1e-9f, 0.05f, 0.5f, 0.9f, 0.999f}) {
    add(0, top_p, 0);
    add(0, top_p, 0.02f);
    add(0, top_p, 0.9f);
  }
  for (const float min_p : {1e-6f, 0.1f, 0.95f, 1.0f}) add(0, 1, min_p);
  for (const double deviation : {0.0, 0.1, 1.0, 4.0, 1000.0}) {
    for (const int64_t vocab : {1, 13, 9001, 40000}) {
      SCOPED_TRACE(testing::Message() << "deviation " << deviation << ", " << vocab << " tokens");
      const auto logits = Array<float>::Random(static_cast<int64_t>(rows.size()), vocab, 3, deviation);
      EXPECT_EQ(TokensOf(OnGpu<float>(logits).mat(), rows), CpuTokensOf(logits, rows));
    }
  }
}

TEST(GpuSampling, GivesARowItsTokenInEveryBatch) {
  MILLRACE_NEEDS_GPU();
  const Batch b(600, 9001, 5, 2);
  std::vector<SamplingRow> rows = b.rows;
  for (SamplingRow& row : rows) row.history = -1, row.bias_begin = row.bias_end = 0;
  const std::vector<int32_t> expected = CpuTokensOf(b.logits, rows);
  const OnGpu<float> logits(b.logits);
  for (const int64_t count : {1, 2, 3, 15, 37, 140, 176, 177, 256, 257, 600}) {
    EXPECT_EQ(TokensOf(logits.mat().Rows(0, count), rows),
              std::vector<int32_t>(expected.begin(), expected.begin() + count));
  }
}

TEST(GpuSampling, ForbidsWhatIsForbidden) {
  MILLRACE_NEEDS_GPU();
  const auto logits = Array<float>::Random(2, 4, 1);
  std::vector<LogitBias> biases;
  for (int32_t t = 0; t < 4; ++t) biases.push_back({t, -INFINITY});
  std::vector<SamplingRow> rows(2);
  rows[0].bias_end = rows[1].bias_end = 4;
  rows[1].temperature = 1;
  const OnGpu<int32_t> tokens(1, 2);
  Sample(tokens.vec(), OnGpu<float>(logits).mat(), OnGpu<SamplingRow>(rows).vec(), OnGpu<LogitBias>(biases).vec(), {},
         GpuStream());
  EXPECT_EQ(tokens.Host().values, (std::vector<int32_t>{-1, -1}));
}

TEST(GpuSampling, CountsTokensAsTheCpuDoes) {
  MILLRACE_NEEDS_GPU();
  const int64_t count = 300, vocab = 50;
  Batch b(count, vocab, 3, 1);
  std::vector<int32_t> tokens;
  for (int64_t r = 0; r < count; ++r) tokens.push_back(static_cast<int32_t>(r * 7 % 51) - 1);
  const OnGpu<TokenCount> history(b.history);
  CountTokens(history.mat(), OnGpu<SamplingRow>(b.rows).vec(), OnGpu<int32_t>(tokens).vec(), GpuStream());
  CountTokens(b.history.mat(), View(b.rows), View(tokens), CpuStream());
  EXPECT_EQ(history.Host().values, b.history.values);
}

TEST(GpuSampling, GivesTheCpusLogProbabilities) {
  MILLRACE_NEEDS_GPU();
  for (const int64_t vocab : {7, 1000, 40001, 151936}) {
    const Batch b(5, vocab, 2, vocab == 40001 ? 0 : 3);  // 0: more equals than can be sorted
    const std::vector<int32_t> tokens{0, 3, -1, 6, 5};
    const int64_t top = std::min<int64_t>(20, vocab);
    std::vector<float> chosen(5);
    Array<float> values(5, top);
    Array<int32_t> ids(5, top);
    LogProbs({chosen.data(), 5}, values.mat(), ids.mat(), b.logits.view(), View(tokens), CpuStream());
    const OnGpu<float> gchosen(1, 5), gvalues(5, top);
    const OnGpu<int32_t> gids(5, top);
    LogProbs(gchosen.vec(), gvalues.mat(), gids.mat(), OnGpu<float>(b.logits).mat(), OnGpu<int32_t>(tokens).vec(),
             GpuStream());
    EXPECT_EQ(gids.Host().values, ids.values);
    const auto expect_near = [](float gpu, float cpu) {  // the sums round in another order
      if (gpu != cpu) {
        EXPECT_NEAR(gpu, cpu, 1e-6 * std::max(1.0f, std::abs(cpu)));
      }
    };
    for (size_t i = 0; i < values.values.size(); ++i) expect_near(gvalues.Host().values[i], values.values[i]);
    for (size_t i = 0; i < 5; ++i) expect_near(gchosen.Host().values[i], chosen[i]);
  }
}

}  // namespace
}  // namespace millrace
