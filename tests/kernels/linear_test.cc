#include "tests/kernels/arrays.h"

namespace millrace {
namespace {

template <class Y, class A>
void ExpectLinear(int64_t rows, int64_t in, int64_t out, bool with_bias) {
  SCOPED_TRACE(testing::Message() << rows << " x " << in << " -> " << out << (with_bias ? " with bias" : ""));
  Stream stream = TestStream(2);
  const auto x = Array<A>::Random(rows, in, 1);
  const auto w = Array<bf16>::Random(out, in, 2);
  const auto bias = Array<float>::Random(1, with_bias ? out : 0, 3);
  const Packed packed(w, stream);
  Array<Y> y(rows, out);
  Linear(y.mat(), x.view(), packed.weight, bias.vec(), stream);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t n = 0; n < out; ++n) {
      double sum = with_bias ? bias.at(0, n) : 0, magnitude = std::abs(sum);
      for (int64_t c = 0; c < in; ++c) {
        sum += x.at(t, c) * w.at(n, c);
        magnitude += std::abs(x.at(t, c) * w.at(n, c));
      }
      ASSERT_NEAR(y.at(t, n), sum, Tolerance<Y>(in, magnitude)) << t << ", " << n;
    }
  }
}

TEST(Linear, MultipliesALiteral) {
  Stream stream = TestStream(1);
  Array<bf16> w(2, 3);
  w.values = {bf16(1), bf16(2), bf16(3), bf16(-1), bf16(0.5f), bf16(0)};
  const Packed packed(w, stream);
  const std::vector<float> x = {1, 10, 100}, bias = {0.25f, 0};
  std::vector<float> y(2);
  Linear(Mat<float>{y.data(), 1, 2}, Mat<const float>(x.data(), 1, 3), packed.weight, View(bias), stream);
  EXPECT_EQ(y, (std::vector<float>{321.25f, 4}));
}

TEST(Linear, AgreesWithADoubleSumAtAwkwardSizes) {
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13, 25}) {
    for (const int64_t in : {1, 7, 111}) {
      for (const int64_t out : {1, 7, 111, 320}) {
        ExpectLinear<float, float>(rows, in, out, (rows + in) % 2 == 0);
        ExpectLinear<bf16, bf16>(rows, in, out, (rows + in) % 2 == 1);
        ExpectLinear<float, bf16>(rows, in, out, false);
      }
    }
  }
  ExpectLinear<float, float>(7, 989, 989, true);
  ExpectLinear<float, float>(64, 576, 111, false);
}

TEST(Linear, SumsInAscendingOrderWithOneFusedMultiplyAddEach) {
  Stream stream = TestStream(2);
  for (const int64_t rows : {1, 7, 64}) {
    const auto x = Array<float>::Random(rows, 333, 4);
    const auto w = Array<bf16>::Random(45, 333, 5);
    const Packed packed(w, stream);
    Array<float> y(rows, 45);
    Linear(y.mat(), x.view(), packed.weight, {}, stream);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t n = 0; n < 45; ++n) {
        float sum = 0;
        for (int64_t c = 0; c < 333; ++c) {
          sum = std::fma(static_cast<float>(x.at(t, c)), static_cast<float>(w.at(n, c)), sum);
        }
        ASSERT_EQ(static_cast<float>(y.at(t, n)), sum);
      }
    }
  }
}

TEST(PackRows, PlacesRowsOfSeveralMatricesInOneWeight) {
  Stream stream = TestStream(1);
  const auto a = Array<bf16>::Random(21, 9, 1), b = Array<bf16>::Random(12, 9, 2);
  std::vector<bf16> memory(PackedWeightBytes(33, 9, Device::kCpu) / sizeof(bf16));
  const PackedWeight weight{memory.data(), 33, 9};
  PackRows(weight, 0, a.view(), stream);
  PackRows(weight, 21, b.view(), stream);
  std::vector<int32_t> tokens(33);
  for (int32_t t = 0; t < 33; ++t) tokens[t] = t;
  Array<float> out(33, 9);
  Embedding(out.mat(), weight, View(tokens), stream);
  std::vector<float> expected;
  for (const auto& half : {a, b}) {
    for (const bf16 value : half.values) expected.push_back(static_cast<float>(value));
  }
  EXPECT_TRUE(SameBits(out.values, expected));
}

TEST(Embedding, GathersRowsOfTheTable) {
  Stream stream = TestStream(2);
  const auto table = Array<bf16>::Random(50, 31, 1);
  const Packed packed(table, stream);
  const std::vector<int32_t> tokens = {49, 0, 17, 17};
  Array<float> out(4, 31);
  Embedding(out.mat(), packed.weight, View(tokens), stream);
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t c = 0; c < 31; ++c) ASSERT_EQ(out.at(t, c), table.at(tokens[t], c));
  }
}

TEST(Bf16, RoundsToNearestEvenAndKeepsNanAndInfinity) {
  const auto bits = [](uint32_t u) { return bf16(std::bit_cast<float>(u)).bits; };
  EXPECT_EQ(bits(0x3f800000), 0x3f80);  // exact
  EXPECT_EQ(bits(0x3f808000), 0x3f80);  // tie to even, down
  EXPECT_EQ(bits(0x3f818000), 0x3f82);  // tie to even, up
  EXPECT_EQ(bits(0x3f808001), 0x3f81);
  EXPECT_EQ(bits(0x7f7fffff), 0x7f80);  // the largest float becomes infinity
  EXPECT_EQ(bits(0xff800000), 0xff80);
  EXPECT_EQ(bits(0x7f800001), 0x7fc0);  // a NaN stays one
  for (uint32_t u = 0; u < 0x10000; ++u) {
    const bf16 v(std::bit_cast<float>(u << 16));
    if (!std::isnan(static_cast<float>(v))) {
      ASSERT_EQ(v.bits, u);
    }
  }
}

}  // namespace
}  // namespace millrace
