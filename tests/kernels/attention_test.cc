#include "tests/kernels/paged.h"

namespace millrace {
namespace {

template <class A>
void ExpectAttention(PagedBatch<A> b) {
  SCOPED_TRACE(testing::Message() << b.heads << " heads, " << b.kv_heads << " kv heads of " << b.dim);
  Stream stream = TestStream(2);
  const float scale = 1 / std::sqrt(static_cast<float>(b.dim));
  b.PoisonUnusedSlots();
  Array<A> out(b.qkv.rows, b.heads * b.dim);
  PagedAttention(out.mat(), b.qkv.view(), b.kv(), b.batch(), scale, stream);
  for (size_t s = 0; s < b.context_len.size(); ++s) {
    for (int row = b.query_start[s]; row < b.query_start[s + 1]; ++row) {
      const int visible = b.context_len[s] - (b.query_start[s + 1] - 1 - row);
      for (int h = 0; h < b.heads; ++h) {
        const int kv_head = h * b.kv_heads / b.heads;
        std::vector<double> p(visible);
        double sum = 0;
        for (int t = 0; t < visible; ++t) {
          double score = 0;
          for (int d = 0; d < b.dim; ++d) score += b.qkv.at(row, h * b.dim + d) * b.key(s, t, kv_head, d);
          sum += p[t] = std::exp(score * scale);
        }
        for (int d = 0; d < b.dim; ++d) {
          double expected = 0, magnitude = 0;
          for (int t = 0; t < visible; ++t) {
            expected += p[t] / sum * b.value(s, t, kv_head, d);
            magnitude += p[t] / sum * std::abs(b.value(s, t, kv_head, d));
          }
          ASSERT_NEAR(out.at(row, h * b.dim + d), expected, Tolerance<A>(visible + b.dim, magnitude))
              << "row " << row << " dim " << d;
        }
      }
    }
  }
}

TEST(PagedAttention, AgreesWithADoubleSoftmaxForEveryHeadShape) {
  for (const int dim : {16, 48, 64, 128, 256}) {
    for (const int ratio : {1, 3, 4, 7}) {
      const std::vector<int> rows = {1, 5, 1, 40}, contexts = {1, 5, 111, 70};
      ExpectAttention(PagedBatch<float>(ratio * 2, 2, dim, rows, contexts));
      ExpectAttention(PagedBatch<bf16>(ratio, 1, dim, rows, contexts));
    }
  }
  ExpectAttention(PagedBatch<float>(9, 3, 64, {7, 1}, {989, 989}));
}

TEST(PagedAttention, OfOneTokenIsItsValue) {
  Stream stream = TestStream(1);
  PagedBatch<float> b(2, 2, 16, {1}, {1});
  Array<float> out(1, 32);
  PagedAttention(out.mat(), b.qkv.view(), b.kv(), b.batch(), 0.25f, stream);
  for (int h = 0; h < 2; ++h) {
    for (int d = 0; d < 16; ++d) EXPECT_EQ(out.at(0, h * 16 + d), b.value(0, 0, h, d));
  }
}

TEST(PagedAttention, SurvivesScoresFarApart) {
  Stream stream = TestStream(1);
  PagedBatch<float> b(1, 1, 16, {1}, {100});
  for (float& q : b.qkv.values) q *= 1e4f;
  Array<float> out(1, 16);
  PagedAttention(out.mat(), b.qkv.view(), b.kv(), b.batch(), 1, stream);
  for (int d = 0; d < 16; ++d) EXPECT_TRUE(std::isfinite(out.at(0, d)));
}

}  // namespace
}  // namespace millrace
