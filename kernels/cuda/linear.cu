// y = x W^T (+ bias): chooses the kernel. All give the same bits (linear.cuh).
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

// Beyond 16 rows a block for few reads too much of x; long sums of these widths still gain, as their segments' sums
// stay within the block.
bool HasFewRows(const LinearArgs& args) {
  const bool gains = args.k > 1024 && ((args.n > 2048 && args.n <= 4096) || (args.n > 16384 && args.n <= 32768));
  return args.m <= (gains ? 32 : 16);
}

template <class Y>
void Choose(Mat<Y> y, Mat<const bf16> x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  if (x.rows == 0) return;
  const LinearArgs args{x.data, w.data, bias.size == 0 ? nullptr : bias.data, y.data, y.rows, y.cols, x.cols};
  if (!InPacks(x.data, x.cols) || !InPacks(w.data, x.cols)) {
    LinearUnaligned<Y>(args, stream);
  } else if (HasFewRows(args)) {
    LinearFewRows<Y>(args, stream);
  } else {
    LinearManyRows<Y>(args, stream);
  }
}

}  // namespace

void Linear(Mat<bf16> y, Mat<const bf16> x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  Choose(y, x, w, bias, stream);
}
void Linear(Mat<float> y, Mat<const bf16> x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  Choose(y, x, w, bias, stream);
}

}  // namespace millrace::cuda
