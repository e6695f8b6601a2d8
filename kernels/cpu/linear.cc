#include "kernels/cpu/builds.h"
#include "kernels/cpu/tile.h"

namespace millrace::cpu::MILLRACE_ISA {
namespace {

// Panels that stay in the second-level cache while all rows pass over them.
constexpr int64_t kGroupBytes = 128 * 1024;

// The rows as floats: themselves, or a widened copy in `scratch`.
MILLRACE_LANES const float* AsFloat(Mat<const float> x, int64_t row, int64_t, float*) { return x.data + row * x.cols; }
MILLRACE_LANES const float* AsFloat(Mat<const bf16> x, int64_t row, int64_t rows, float* scratch) {
  const bf16* from = x.data + row * x.cols;
  ForLanes(rows * x.cols, [&](int64_t i, auto load, auto store) { store(scratch + i, load(from + i)); });
  return scratch;
}

struct Zero {
  MILLRACE_LANES F16 operator()(int, int64_t) const { return Broadcast(0); }
};

// Adds the bias and stores. Out of line: the tiles are many, and their loops are where the time goes.
template <class Y>
struct Outputs {
  Mat<Y> y;  // from the tile's first row on
  Vec<const float> bias;

  __attribute__((noinline)) void operator()(int m, int64_t p, F16 sum) const {
    const int64_t n = p * kPanelRows, width = y.cols - n;
    Y* const to = y.data + m * y.cols + n;
    if (width >= kPanelRows) {
      Store(to, bias.size == 0 ? sum : Add(sum, Load(bias.data + n)));
    } else {
      StoreSome(to, bias.size == 0 ? sum : Add(sum, LoadSome(bias.data + n, width)), width);
    }
  }
};

}  // namespace

template <class Y, class A>
void LinearPanels(Mat<Y> y, Mat<const A> x, PackedWeight w, Vec<const float> bias, float* scratch, Range panels) {
  Panels<bf16> weights{w.data, w.in * kPanelRows, kPanelRows};
  const int64_t fitting = kGroupBytes / (w.in * kPanelRows * static_cast<int64_t>(sizeof(bf16)));
  const int64_t group = x.rows <= kTileRows ? panels.end - panels.begin : fitting < 4 ? 4 : fitting / 4 * 4;
  if (x.rows > kTileRows)
    weights.ahead = group * weights.panel_stride;  // the next group comes while all rows use this one
  for (int64_t begin = panels.begin; begin < panels.end; begin += group) {
    const int64_t end = begin + group < panels.end ? begin + group : panels.end;
    int64_t tiles = (x.rows + kTileRows - 1) / kTileRows;
    for (int64_t row = 0, rows; tiles > 0; row += rows, --tiles) {
      rows = (x.rows - row + tiles - 1) / tiles;
      const Outputs<Y> outputs{{y.data + row * y.cols, rows, y.cols}, bias};
      MultiplyRows(static_cast<int>(rows), AsFloat(x, row, rows, scratch), x.cols, weights, w.in, begin, end, Zero{},
                   outputs);
    }
  }
}

template void LinearPanels(Mat<float>, Mat<const float>, PackedWeight, Vec<const float>, float*, Range);
template void LinearPanels(Mat<float>, Mat<const bf16>, PackedWeight, Vec<const float>, float*, Range);
template void LinearPanels(Mat<bf16>, Mat<const bf16>, PackedWeight, Vec<const float>, float*, Range);

}  // namespace millrace::cpu::MILLRACE_ISA
