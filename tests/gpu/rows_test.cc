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

}  // namespace
}  // namespace millrace
