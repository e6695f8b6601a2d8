// y = x W^T (+ bias), of x as it is or normalised: chooses the kernels. All give the same bits (linear.cuh).
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/ops.h"

namespace millrace::cuda {
namespace {

// Beyond 16 rows a block for few reads too much of x; long sums of this width still gain, as their segments' sums stay
// within the block.
bool HasFewRows(const LinearArgs& args) {
  const bool gains = args.k > 1024 && args.n > 2048 && args.n <= 4096;
  return args.m <= (gains ? 32 : 16);
}

template <class Y>
void Choose(Mat<Y> y, Mat<const bf16> x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  if (x.rows == 0) return;
  const LinearArgs args{x.data, w.data, bias.size == 0 ? nullptr : bias.data, y.data, y.rows, y.cols, x.cols};
  if (!InPacks(x.data, x.cols) || !InPacks(w.data, x.cols)) {
    LinearUnaligned<Y>(args, stream);
  } else if (std::is_same_v<Y, float> && IsResident(args.m, args.n, args.k)) {
    LinearResident(args, stream);
  } else if (HasFewRows(args)) {
    LinearFewRows<Y>(args, stream);
  } else {
    LinearManyRows<Y>(args, stream);
  }
}

NormedArgs ArgsOf(const NormedInput<bf16>& x) {
  return {x.residual.data, x.delta.rows == 0 ? nullptr : x.delta.data, x.weight.data, x.sum.data, x.eps};
}
bool FitsNormResident(const NormedInput<bf16>& x, PackedWeight w) {
  const int64_t k = x.rows.cols;
  return IsNormResident(x.rows.rows, w.out, k) && InPacks(w.data, k) && InPacks(x.residual.data, k) &&
         InPacks(x.delta.data, k) && InPacks(x.sum.data, k) && InPacks(x.weight.data, k);
}

}  // namespace

void NormLinear(Mat<bf16> y, const NormedInput<bf16>& x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  if (y.rows == 0) return;
  if (FitsNormResident(x, w)) {
    const float* const added = bias.size == 0 ? nullptr : bias.data;
    return NormLinearResident({nullptr, w.data, added, y.data, y.rows, w.out, w.in}, ArgsOf(x), stream);
  }
  Normalise(x, stream);
  Linear(y, x.rows, w, bias, stream);
}
void NormGateUp(Mat<bf16> out, const NormedInput<bf16>& x, PackedWeight gate_up, Mat<bf16> products, Stream& stream) {
  if (out.rows == 0) return;
  if (FitsNormResident(x, gate_up)) {
    return NormGateUpResident({nullptr, gate_up.data, nullptr, out.data, out.rows, gate_up.out, gate_up.in}, ArgsOf(x),
                              stream);
  }
  Normalise(x, stream);
  const LinearArgs args{x.rows.data, gate_up.data, nullptr, out.data, out.rows, gate_up.out, gate_up.in};
  if (!HasFewRows(args) && args.n % 16 == 0 && InPacks(args.x, args.k) && InPacks(args.w, args.k) &&
      InPacks(out.data, out.cols)) {
    return LinearGated(args, stream);
  }
  Linear(products, x.rows, gate_up, {}, stream);
  SiluMul(out, products, stream);
}
void Linear(Mat<bf16> y, Mat<const bf16> x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  Choose(y, x, w, bias, stream);
}
void Linear(Mat<float> y, Mat<const bf16> x, PackedWeight w, Vec<const float> bias, Stream& stream) {
  Choose(y, x, w, bias, stream);
}

}  // namespace millrace::cuda
