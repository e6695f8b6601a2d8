#include <tuple>

#include "tests/gpu/device_arrays.h"

namespace millrace {
namespace {

constexpr int64_t kRows[] = {1, 7, 111, 989};
constexpr int64_t kCols[] = {7, 111, 576, 1024, 4096};

template <class Fn>
void ForShapes(const Fn& fn) {
  for (const int64_t rows : kRows) {
    for (const int64_t cols : kCols) {
      SCOPED_TRACE(testing::Message() << rows << " x " << cols);
      fn(rows, cols);
    }
  }
}

void ExpectNear(const Array<bf16>& gpu, const Array<bf16>& cpu) {
  for (size_t i = 0; i < cpu.values.size(); ++i) {
    const double a = static_cast<float>(gpu.values[i]), b = static_cast<float>(cpu.values[i]);
    ASSERT_NEAR(a, b, Between<bf16>(1, std::abs(b), b)) << i;
  }
}

TEST(GpuRows, NormaliseAsTheCpuDoes) {
  MILLRACE_NEEDS_GPU();
  ForShapes([](int64_t rows, int64_t cols) {
    const auto x = Array<float>::Random(rows, cols, 1), delta = Array<float>::Random(rows, cols, 2);
    const auto weight = Array<float>::Random(1, cols, 3);
    const OnGpu<bf16> gout(rows, cols);
    const OnGpu<float> gx(x), gdelta(delta), gweight(weight);
    Array<bf16> out(rows, cols);
    Array<float> residual = x;
    RmsNorm(out.mat(), x.view(), weight.vec(), 1e-6f, CpuStream());
    RmsNorm(gout.mat(), gx.mat(), gweight.vec(), 1e-6f, GpuStream());
    ExpectNear(gout.Host(), out);
    AddRmsNorm(out.mat(), residual.mat(), delta.view(), weight.vec(), 1e-6f, CpuStream());
    AddRmsNorm(gout.mat(), gx.mat(), gdelta.mat(), gweight.vec(), 1e-6f, GpuStream());
    ExpectNear(gout.Host(), out);
    EXPECT_TRUE(SameBits(gx.Host().values, residual.values));
  });
}

TEST(GpuRows, MultiplyBySiluAsTheCpuDoes) {
  MILLRACE_NEEDS_GPU();
  ForShapes([](int64_t rows, int64_t cols) {
    const auto x = Array<bf16>::Random(rows, 2 * cols, 4, 20);
    const OnGpu<bf16> gx(x), gout(rows, cols);
    Array<bf16> out(rows, cols);
    SiluMul(out.mat(), x.view(), CpuStream());
    SiluMul(gout.mat(), gx.mat(), GpuStream());
    ExpectNear(gout.Host(), out);
  });
}

TEST(GpuRows, CopyAndAddToTheCpusBits) {
  MILLRACE_NEEDS_GPU();
  ForShapes([](int64_t rows, int64_t cols) {
    const auto x = Array<bf16>::Random(rows, cols, 5), delta = Array<bf16>::Random(rows, cols, 6);
    std::vector<int32_t> ids;
    for (int64_t r = 0; r < 2 * rows; ++r) ids.push_back(static_cast<int32_t>(r * 7919 % rows));
    const OnGpu<bf16> gx(x), gdelta(delta), gout(2 * rows, cols);
    const OnGpu<int32_t> gids(ids);
    Array<bf16> out(2 * rows, cols), sum = x;
    GatherRows(out.mat(), x.view(), View(ids), CpuStream());
    GatherRows(gout.mat(), gx.mat(), gids.vec(), GpuStream());
    EXPECT_TRUE(SameBits(gout.Host().values, out.values));
    const OnGpu<bf16> table(rows, cols);
    const OnGpu<float> embedded(2 * rows, cols);
    const PackedWeight packed{table.mat().data, rows, cols};
    PackRows(packed, 0, x.view().Rows(0, 1), GpuStream());
    PackRows(packed, 1, x.view().Rows(1, rows - 1), GpuStream());
    Embedding(embedded.mat(), packed, gids.vec(), GpuStream());
    std::vector<float> widened;
    for (const bf16 value : out.values) widened.push_back(static_cast<float>(value));
    EXPECT_TRUE(SameBits(embedded.Host().values, widened));
    Add(sum.mat(), delta.view(), CpuStream());
    Add(gx.mat(), gdelta.mat(), GpuStream());
    EXPECT_TRUE(SameBits(gx.Host().values, sum.values));
  });
}

// A row is rotated and appended to the same bits in a call of many rows, where several heads share a lane, as in one of
// few; values that are not finite included.
TEST(GpuRows, RotateManyRowsAsFew) {
  MILLRACE_NEEDS_GPU();
  constexpr int64_t kAll = 600, kPart = 200, kBlocks = kAll / kBlockTokens + 1;
  for (const auto& [heads, kv_heads, dim] : {std::tuple{16, 8, 128}, {8, 2, 64}, {14, 2, 64}, {4, 1, 32}, {4, 4, 16}}) {
    for (const bool with_norms : {true, false}) {
      SCOPED_TRACE(testing::Message() << heads << ", " << kv_heads << " x " << dim << (with_norms ? ", norms" : ""));
      Array<bf16> qkv = Array<bf16>::Random(kAll, (heads + 2 * kv_heads) * dim, 20);
      qkv.mat().row(7)[(heads + kv_heads) * dim + 3] = bf16(NAN);
      qkv.mat().row(300)[2] = bf16(INFINITY);
      std::vector<int32_t> positions, slots;
      for (int32_t t = 0; t < kAll; ++t) {
        positions.push_back(t * 31 % 997);
        slots.push_back(t % 13 == 5 ? -1 : t * 7 % static_cast<int32_t>(kAll));
      }
      const OnGpu<float> norm(Array<float>::Random(1, dim, 21)), cos(Array<float>::Random(997, dim / 2, 22)),
          sin(Array<float>::Random(997, dim / 2, 23));
      const OnGpu<int32_t> gpositions(positions), gslots(slots);
      const Vec<const float> norms = with_norms ? Vec<const float>(norm.vec()) : Vec<const float>{};
      const auto after = [&](int64_t step) {
        const OnGpu<bf16> rows(qkv), k(kBlocks, kBlockTokens * kv_heads * dim), v(kBlocks, k.mat().cols);
        for (int64_t begin = 0; begin < kAll; begin += step) {
          RopeAppend<bf16>(rows.mat().Rows(begin, step), {k.mat().data, v.mat().data, kBlocks, kv_heads, dim}, norms,
                           norms, 1e-6f, {cos.mat(), sin.mat()}, {gpositions.vec().data + begin, step},
                           {gslots.vec().data + begin, step}, GpuStream());
        }
        return std::vector{rows.Host().values, k.Host().values, v.Host().values};
      };
      const auto many = after(kAll), few = after(kPart);
      for (size_t i = 0; i < many.size(); ++i) EXPECT_TRUE(SameBits(many[i], few[i])) << i;
    }
  }
}

}  // namespace
}  // namespace millrace
