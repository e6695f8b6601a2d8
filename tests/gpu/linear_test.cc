#include <algorithm>

#include "tests/gpu/device_arrays.h"

namespace millrace {
namespace {

template <class T>
Array<T> Magnitudes(Array<T> a) {
  for (T& v : a.values) v = T(std::abs(static_cast<float>(v)));
  return a;
}

template <class Y>
void ExpectLinear(int64_t rows, int64_t in, int64_t out, bool with_bias) {
  SCOPED_TRACE(testing::Message() << rows << " x " << in << " -> " << out);
  const auto x = Array<bf16>::Random(rows, in, 1), w = Array<bf16>::Random(out, in, 2);
  const auto bias = Array<float>::Random(1, with_bias ? out : 0, 3);
  Array<Y> y(rows, out);
  Array<float> magnitude(rows, out);
  Linear(y.mat(), x.view(), Packed(w, CpuStream()).weight, bias.vec(), CpuStream());
  Linear(magnitude.mat(), Magnitudes(x).view(), Packed(Magnitudes(w), CpuStream()).weight, {}, CpuStream());
  const OnGpu<bf16> gx(x), gw(w);
  const OnGpu<float> gbias(bias);
  const OnGpu<Y> gy(rows, out);
  Linear(gy.mat(), Mat<const bf16>(gx.mat()), {gw.mat().data, out, in}, with_bias ? gbias.vec() : Vec<float>{},
         GpuStream());
  const Array<Y> result = gy.Host();
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t n = 0; n < out; ++n) {
      ASSERT_NEAR(result.at(t, n), y.at(t, n), Between<Y>(in, magnitude.at(t, n) + 1, y.at(t, n))) << t << ", " << n;
    }
  }
}

TEST(GpuLinear, AgreesWithTheCpuAtAwkwardSizes) {
  MILLRACE_NEEDS_GPU();
  for (const int64_t rows : {1, 7, 16, 17, 33, 64, 65, 111, 129}) {
    for (const auto& [in, out] :
         {std::pair{1, 1}, {7, 111}, {111, 37}, {80, 240}, {576, 960}, {1024, 130}, {989, 513}}) {
      ExpectLinear<bf16>(rows, in, out, rows % 2 == 1);
      ExpectLinear<float>(rows, in, out, rows % 2 == 0);
    }
  }
  for (const int64_t rows : {1, 7, 111, 989}) {
    ExpectLinear<bf16>(rows, 1024, 4096, false);  // Qwen3-0.6B
    ExpectLinear<bf16>(rows, 3072, 1024, true);
    ExpectLinear<bf16>(rows, 1536, 576, false);  // SmolLM2
  }
  for (const int64_t rows : {1, 7, 111}) {
    ExpectLinear<bf16>(rows, 4096, 6144, false);  // Llama-3.1-8B
    ExpectLinear<bf16>(rows, 14336, 4096, false);
  }
  ExpectLinear<float>(7, 1024, 49152, false);
}

struct OnBoth {
  Array<bf16> x, w;
  OnGpu<bf16> gx{x}, gw{w};
  Array<float> Rows(int64_t begin, int64_t count) const {
    const OnGpu<float> y(count, w.rows);
    Linear(y.mat(), Mat<const bf16>(gx.mat()).Rows(begin, count), {gw.mat().data, w.rows, w.cols}, {}, GpuStream());
    return y.Host();
  }
};

void ExpectSameBits(const Array<float>& part, const Array<float>& whole, int64_t begin) {
  EXPECT_EQ(0, std::memcmp(part.values.data(), whole.view().row(begin), part.values.size() * sizeof(float)))
      << part.rows << " rows from " << begin << " of " << whole.rows << ", " << part.cols << " outputs";
}

// A row of any call equals itself in a call of 4096 rows, to the bit: the row counts lie on both sides of every seam
// between kernels and between their tiles.
TEST(GpuLinear, GivesARowTheSameBitsInAnyBatch) {
  MILLRACE_NEEDS_GPU();
  for (const auto& [in, out] : {std::pair{1024, 4096},
                                {2048, 1024},
                                {1024, 6144},
                                {3072, 1024},
                                {4096, 4096},
                                {12288, 512},
                                {111, 37},
                                {72, 521},
                                {576, 960},
                                {64, 48},
                                {1088, 4224},
                                {256, 8192},
                                {1024, 2048},
                                {4096, 130}}) {
    SCOPED_TRACE(testing::Message() << in << " -> " << out);
    constexpr int64_t kRows = 4096;
    const OnBoth both{Array<bf16>::Random(kRows, in, 4), Array<bf16>::Random(out, in, 5)};
    const Array<float> whole = both.Rows(0, kRows);
    for (const int64_t batch : {1,   2,   5,   7,   8,   9,   16,  17,  32,  33,  40,  64,   65,   72,   128,
                                129, 136, 192, 193, 200, 256, 257, 384, 385, 512, 513, 1024, 1025, 1500, 2049}) {
      for (const int64_t begin : {int64_t{0}, int64_t{1}, kRows - batch}) {
        ExpectSameBits(both.Rows(begin, batch), whole, begin);
      }
    }
  }
}

// NormLinear and NormGateUp are AddRmsNorm (RmsNorm without a delta), Linear and SiluMul, to the bit, for every number
// of rows: what they fuse shows nowhere.
TEST(GpuLinear, FusedWithNormsAndSiluGivesTheSameBits) {
  MILLRACE_NEEDS_GPU();
  for (const auto& [in, out] : {std::pair{1024, 4096},
                                {1024, 6144},
                                {1024, 2048},
                                {576, 960},
                                {64, 48},
                                {72, 528},
                                {896, 9728},
                                {128, 1048},
                                {2048, 4096},
                                {4096, 6144},
                                {111, 38}}) {
    SCOPED_TRACE(testing::Message() << in << " -> " << out);
    constexpr int64_t kRows = 1100;
    const OnGpu<float> residual(Array<float>::Random(kRows, in, 10)), delta(Array<float>::Random(kRows, in, 11)),
        norm(Array<float>::Random(1, in, 12)), bias(Array<float>::Random(1, out, 13));
    const OnGpu<bf16> w(Array<bf16>::Random(out, in, 14)), normed(kRows, in), products(kRows, out);
    const PackedWeight weight{w.mat().data, out, in};
    for (const bool adds : {true, false}) {
      OnGpu<float> sum(Array<float>::Random(kRows, in, 10));
      if (adds) AddRmsNorm(normed.mat(), sum.mat(), delta.mat(), norm.vec(), 1e-6f, GpuStream());
      if (!adds) RmsNorm(normed.mat(), sum.mat(), norm.vec(), 1e-6f, GpuStream());
      const OnGpu<bf16> linear(kRows, out), gated(kRows, out / 2);
      Linear(linear.mat(), Mat<const bf16>(normed.mat()), weight, bias.vec(), GpuStream());
      Linear(products.mat(), Mat<const bf16>(normed.mat()), weight, {}, GpuStream());
      SiluMul(gated.mat(), products.mat(), GpuStream());
      const Array<float> sums = sum.Host();
      const Array<bf16> linears = linear.Host(), gates = gated.Host();
      for (const int64_t rows : {1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 257, 513, 1025}) {
        for (const int64_t begin : {int64_t{0}, kRows - rows}) {
          const OnGpu<float> rows_sum(rows, in);
          const OnGpu<bf16> y(rows, out), activated(rows, out / 2), room(rows, in), more_room(rows, out);
          const NormedInput<bf16> x{rows_sum.mat(),
                                    residual.mat().Rows(begin, rows),
                                    adds ? Mat<const float>(delta.mat().Rows(begin, rows)) : Mat<const float>(),
                                    norm.vec(),
                                    1e-6f,
                                    room.mat()};
          const auto same = [&](const auto& part, const auto& whole) {
            return std::memcmp(part.values.data(), whole.view().row(begin),
                               part.values.size() * sizeof(part.values[0])) == 0;
          };
          NormLinear(y.mat(), x, weight, bias.vec(), GpuStream());
          EXPECT_TRUE(same(y.Host(), linears)) << rows << " rows from " << begin;
          EXPECT_TRUE(same(rows_sum.Host(), sums)) << rows << " rows from " << begin;
          NormGateUp(activated.mat(), x, weight, more_room.mat(), GpuStream());
          EXPECT_TRUE(same(activated.Host(), gates)) << rows << " rows from " << begin;
        }
      }
    }
  }
}

// The bits of the widest products: the vocabulary's rows, and a large model's gates.
TEST(GpuLinear, GivesARowOfWideProductsTheSameBitsInAnyBatch) {
  MILLRACE_NEEDS_GPU();
  for (const auto& [in, out] : {std::pair{1024, 49152}, {1088, 17408}}) {
    const OnBoth both{Array<bf16>::Random(257, in, 6), Array<bf16>::Random(out, in, 7)};
    const Array<float> whole = both.Rows(0, 257);
    for (const int64_t batch : {1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 256}) {
      ExpectSameBits(both.Rows(257 - batch, batch), whole, 257 - batch);
    }
  }
}

TEST(GpuLinear, KeepsARowsBitsBesideRowsThatAreNotFinite) {
  MILLRACE_NEEDS_GPU();
  for (const auto& [in, out] : {std::pair{1024, 1024}, {111, 37}, {4096, 4096}}) {
    const OnBoth clean{Array<bf16>::Random(300, in, 8), Array<bf16>::Random(out, in, 9)};
    for (const int64_t rows : {2, 16, 40, 64, 100, 200, 300}) {
      Array<bf16> x = clean.x;
      for (int64_t t = 0; t < rows; ++t) {
        if (t == rows / 2) continue;
        std::fill_n(x.values.begin() + t * in, in, bf16(t % 2 == 0 ? NAN : INFINITY));
      }
      const OnBoth spoilt{x, clean.w};
      const Array<float> expected = clean.Rows(0, rows), result = spoilt.Rows(0, rows);
      EXPECT_EQ(0, std::memcmp(result.view().row(rows / 2), expected.view().row(rows / 2),
                               static_cast<size_t>(out) * sizeof(float)))
          << rows << " rows, " << in << " -> " << out;
    }
  }
}

}  // namespace
}  // namespace millrace
