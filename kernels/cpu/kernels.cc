#include "kernels/cpu/builds.h"
#include "kernels/cpu/tile.h"

namespace millrace::cpu::MILLRACE_ISA {

template <class A>
constexpr ActivationKernels<A> kActivationKernels = {
    LinearPanels<A, A>, LinearPanels<float, A>, RmsNormRows<A>, AddRmsNormRows<A>,
    RopeAppendRows<A>,  AttendTile<A>,          SiluMulRows<A>, AddElements<A>,
};

extern const Kernels kKernels;
const Kernels kKernels = {kTileRows,   kActivationKernels<float>, kActivationKernels<bf16>, IsFinite, MaxOf, ExpSum,
                          PhiloxGroups};
static_assert(kTileRows <= kMaxTileRows);

}  // namespace millrace::cpu::MILLRACE_ISA
