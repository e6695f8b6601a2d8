#include "tests/kernels/arrays.h"

namespace millrace {
namespace {

template <class A>
class RowOps : public testing::Test {};
using Activations = testing::Types<float, bf16>;
TYPED_TEST_SUITE(RowOps, Activations);

constexpr float kEps = 1e-5f;

template <class A>
std::vector<double> NormOf(const Array<A>& x, int64_t t, const Array<float>& weight) {
  double sum = 0;
  for (int64_t c = 0; c < x.cols; ++c) sum += x.at(t, c) * x.at(t, c);
  std::vector<double> out;
  for (int64_t c = 0; c < x.cols; ++c) {
    out.push_back(x.at(t, c) / std::sqrt(sum / static_cast<double>(x.cols) + kEps) * weight.at(0, c));
  }
  return out;
}

TYPED_TEST(RowOps, RmsNormAgreesWithItsFormula) {
  Stream stream = TestStream(2);
  for (const int64_t cols : {1, 7, 16, 111, 576, 989}) {
    const auto x = Array<float>::Random(5, cols, 1);
    const auto weight = Array<float>::Random(1, cols, 2);
    Array<TypeParam> out(5, cols);
    RmsNorm(out.mat(), x.view(), weight.vec(), kEps, stream);
    for (int64_t t = 0; t < 5; ++t) {
      const auto expected = NormOf(x, t, weight);
      for (int64_t c = 0; c < cols; ++c) {
        ASSERT_NEAR(out.at(t, c), expected[c], Tolerance<TypeParam>(cols, std::abs(expected[c]))) << cols;
      }
    }
  }
}

TYPED_TEST(RowOps, AddRmsNormIsAddThenRmsNorm) {
  Stream stream = TestStream(2);
  const auto delta = Array<float>::Random(9, 111, 1);
  auto residual = Array<float>::Random(9, 111, 2), sum = residual;
  for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += delta.values[i];
  const auto weight = Array<float>::Random(1, 111, 3);
  Array<TypeParam> out(9, 111), expected(9, 111);
  AddRmsNorm(out.mat(), residual.mat(), delta.view(), weight.vec(), kEps, stream);
  RmsNorm(expected.mat(), sum.view(), weight.vec(), kEps, stream);
  EXPECT_TRUE(SameBits(residual.values, sum.values));
  EXPECT_TRUE(SameBits(out.values, expected.values));
}

TYPED_TEST(RowOps, NormLinearAndNormGateUpAreTheirParts) {
  Stream stream = TestStream(2);
  constexpr int64_t kRows = 5, kIn = 111, kOut = 70;
  const auto residual = Array<float>::Random(kRows, kIn, 1), delta = Array<float>::Random(kRows, kIn, 2);
  const auto norm = Array<float>::Random(1, kIn, 3), bias = Array<float>::Random(1, kOut, 4);
  const Packed w(Array<bf16>::Random(kOut, kIn, 5), stream);
  for (const bool adds : {false, true}) {
    auto expected_sum = residual;
    Array<TypeParam> rows(kRows, kIn), expected(kRows, kOut), products(kRows, kOut), gated(kRows, kOut / 2);
    if (adds) {
      AddRmsNorm(rows.mat(), expected_sum.mat(), delta.view(), norm.vec(), kEps, stream);
    } else {
      RmsNorm(rows.mat(), residual.view(), norm.vec(), kEps, stream);
    }
    Linear(expected.mat(), rows.view(), w.weight, bias.vec(), stream);
    Linear(products.mat(), rows.view(), w.weight, {}, stream);
    SiluMul(gated.mat(), products.view(), stream);

    Array<float> sum(kRows, kIn);
    Array<TypeParam> y(kRows, kOut), out(kRows, kOut / 2), room(kRows, kIn), more_room(kRows, kOut);
    const NormedInput<TypeParam> x{sum.mat(), residual.view(), adds ? delta.view() : Mat<const float>(), norm.vec(),
                                   kEps,      room.mat()};
    NormLinear(y.mat(), x, w.weight, bias.vec(), stream);
    EXPECT_TRUE(SameBits(y.values, expected.values));
    EXPECT_TRUE(SameBits(sum.values, expected_sum.values));
    NormGateUp(out.mat(), x, w.weight, more_room.mat(), stream);
    EXPECT_TRUE(SameBits(out.values, gated.values));
  }
}

TYPED_TEST(RowOps, AddAddsAndRounds) {
  Stream stream = TestStream(2);
  const auto delta = Array<TypeParam>::Random(3, 111, 1), before = Array<TypeParam>::Random(3, 111, 2);
  auto x = before;
  Add(x.mat(), delta.view(), stream);
  for (int64_t i = 0; i < 3 * 111; ++i) {
    ASSERT_EQ(x.at(0, i),
              static_cast<float>(TypeParam(static_cast<float>(before.at(0, i)) + static_cast<float>(delta.at(0, i)))));
  }
}

TYPED_TEST(RowOps, SiluMulAgreesWithItsFormula) {
  Stream stream = TestStream(2);
  for (const int64_t cols : {1, 7, 111, 989}) {
    const auto gate_up = Array<TypeParam>::Random(3, 2 * cols, 1, 20);
    Array<TypeParam> out(3, cols);
    SiluMul(out.mat(), gate_up.view(), stream);
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t c = 0; c < cols; ++c) {
        const double g = gate_up.at(t, c), expected = g / (1 + std::exp(-g)) * gate_up.at(t, cols + c);
        ASSERT_NEAR(out.at(t, c), expected, Tolerance<TypeParam>(8, std::abs(expected))) << g;
      }
    }
  }
}

TEST(SiluMul, ReachesItsLimitsWithoutNan) {
  Stream stream = TestStream(1);
  std::vector<float> gate_up = {-1000, -100, 0, 100, 1e30f, 1, 1, 1, 1, 1}, out(5);
  SiluMul(Mat<float>{out.data(), 1, 5}, Mat<const float>(gate_up.data(), 1, 10), stream);
  EXPECT_NEAR(out[0], 0, 1e-30);
  EXPECT_NEAR(out[1], 0, 1e-30);
  EXPECT_EQ(out[2], 0);
  EXPECT_EQ(out[3], 100);
  EXPECT_EQ(out[4], 1e30f);
}

TYPED_TEST(RowOps, GatherRowsCopiesThem) {
  Stream stream = TestStream(2);
  const auto x = Array<TypeParam>::Random(7, 13, 1);
  const std::vector<int32_t> rows = {6, 0, 0};
  Array<TypeParam> out(3, 13);
  GatherRows(out.mat(), x.view(), View(rows), stream);
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 13; ++c) ASSERT_EQ(out.at(r, c), x.at(rows[r], c));
  }
}

TYPED_TEST(RowOps, RopeAppendRotatesAndFillsTheSlots) {
  Stream stream = TestStream(2);
  constexpr int64_t kRows = 5, kBlocks = 3;
  for (const int dim : {16, 48, 64, 128, 256}) {
    for (const bool with_norms : {false, true}) {
      const int heads = 3, kv_heads = 1;
      const auto before = Array<TypeParam>::Random(kRows, (heads + 2 * kv_heads) * dim, 1);
      auto qkv = before;
      const auto q_norm = Array<float>::Random(1, with_norms ? dim : 0, 2),
                 k_norm = Array<float>::Random(1, with_norms ? dim : 0, 3);
      const auto cos = Array<float>::Random(40, dim / 2, 4), sin = Array<float>::Random(40, dim / 2, 5);
      const std::vector<int32_t> positions = {0, 39, 7, 7, 1}, slots = {0, 95, 33, -1, 64};
      Array<TypeParam> k(kBlocks, kv_heads * dim * kBlockTokens), v = k;
      const KvLayer<TypeParam> kv{k.values.data(), v.values.data(), kBlocks, kv_heads, dim};
      RopeAppend(qkv.mat(), kv, q_norm.vec(), k_norm.vec(), kEps, RopeTable{cos.view(), sin.view()}, View(positions),
                 View(slots), stream);
      for (int64_t t = 0; t < kRows; ++t) {
        for (int h = 0; h < heads + kv_heads; ++h) {
          Array<TypeParam> head(1, dim);
          std::copy_n(before.view().row(t) + h * dim, dim, head.values.begin());
          std::vector<double> x;
          for (int d = 0; d < dim; ++d) x.push_back(head.at(0, d));
          if (with_norms) x = NormOf(head, 0, h < heads ? q_norm : k_norm);
          for (int i = 0; i < dim; ++i) {
            const int half = i % (dim / 2);
            const double a = x[half], b = x[half + dim / 2], c = cos.at(positions[t], half),
                         s = sin.at(positions[t], half);
            const double expected = i < dim / 2 ? a * c - b * s : b * c + a * s;
            const double bound =
                Tolerance<TypeParam>(dim, (std::abs(a) + std::abs(b)) * (std::abs(c) + std::abs(s))) * 2;
            if (h < heads) {
              ASSERT_NEAR(qkv.at(t, h * dim + i), expected, bound);
            } else if (slots[t] >= 0) {
              ASSERT_NEAR(k.at(slots[t] / kBlockTokens, i * kBlockTokens + slots[t] % kBlockTokens), expected, bound);
              ASSERT_EQ(v.at(slots[t] / kBlockTokens, slots[t] % kBlockTokens * dim + i),
                        before.at(t, (heads + kv_heads) * dim + i));
            }
          }
        }
      }
      int64_t written = 0;
      for (int64_t i = 0; i < kBlocks * kBlockTokens; ++i)
        written += v.at(i / kBlockTokens, i % kBlockTokens * dim) != 0;
      EXPECT_EQ(written, 4);
    }
  }
}

}  // namespace
}  // namespace millrace
