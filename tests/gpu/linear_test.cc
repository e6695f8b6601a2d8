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

// Row r of `rows` rows equals itself alone, to the bit.
TEST(GpuLinear, GivesARowTheSameBitsInAnyBatch) {
  MILLRACE_NEEDS_GPU();
  for (const auto& [in, out] : {std::pair{1024, 1024},
                                {3072, 1024},
                                {4096, 4096},
                                {14336, 512},
                                {111, 37},
                                {576, 960},
                                {64, 48},
                                {1024, 8192}}) {
    const auto x = Array<bf16>::Random(257, in, 4), w = Array<bf16>::Random(out, in, 5);
    const OnGpu<bf16> gx(x), gw(w);
    const PackedWeight weight{gw.mat().data, out, in};
    const OnGpu<float> whole(257, out);
    Linear(whole.mat(), Mat<const bf16>(gx.mat()), weight, {}, GpuStream());
    const Array<float> expected = whole.Host();
    for (const int64_t batch : {1, 7, 17, 64, 65, 129, 256}) {
      for (const int64_t begin : {int64_t{0}, int64_t{1}, 257 - batch}) {
        if (begin + batch > 257) continue;
        const OnGpu<float> part(batch, out);
        Linear(part.mat(), Mat<const bf16>(gx.mat()).Rows(begin, batch), weight, {}, GpuStream());
        EXPECT_EQ(
            0, std::memcmp(part.Host().values.data(), expected.view().row(begin), static_cast<size_t>(batch * out) * 4))
            << batch << " rows from " << begin << ", " << in << " -> " << out;
      }
    }
  }
}

}  // namespace
}  // namespace millrace
