// y = x W^T (+ bias): chooses the kernel. Both give the same bits (linear.cuh).
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

// A block of the kernel for many rows takes about twice as long as one for few.
bool HasFewRows(const LinearArgs& args, const Stream& stream) {
  const int64_t sms = StateOf(stream).num_sms;
  const int64_t few = DivideUp(DivideUp(args.n, 32) * DivideUp(args.m, 64), sms);
  const int64_t many = DivideUp(DivideUp(args.n, 128) * DivideUp(args.m, 128), sms);
  return args.m <= 64 || few < 2 * many;
}

template <class Y, bool kPacked>
void Multiply(const LinearArgs& args, Stream& stream) {
  if (HasFewRows(args, stream)) {
    LinearFewRows<Y, kPacked>(args, stream);
  } else {
    LinearManyRows<Y, kPacked>(args, stream);
  }
}

template <class Y>
void Choose(Mat<Y> y, Mat<const bf16> x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  if (x.rows == 0) return;
  const LinearArgs args{x.data, w.data, bias.size == 0 ? nullptr : bias.data, y.data, y.rows, y.cols, x.cols};
  if (InPacks(x.data, x.cols) && InPacks(w.data, x.cols)) {
    Multiply<Y, true>(args, stream);
  } else {
    Multiply<Y, false>(args, stream);
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
