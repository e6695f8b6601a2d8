#include "kernels/cpu/isa.h"

#include "kernels/check.h"
#include "kernels/cpu/state.h"

namespace millrace::cpu {

namespace portable {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

bool Supports(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kAvx512:
      return Supports(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
}

Isa BestIsa() {
  if (Supports(Isa::kAvx512)) return Isa::kAvx512;
  return Supports(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPortable;
}

void ForceIsa(Stream& stream, Isa isa) {
  MILLRACE_CHECK(Supports(isa), "the machine has the forced instruction set", static_cast<int>(isa));
  StateOf(stream).kernels = &KernelsFor(isa);
}

const Kernels& KernelsFor(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return avx512::kKernels;
    case Isa::kAvx2:
      return avx2::kKernels;
    case Isa::kPortable:
      break;
  }
  return portable::kKernels;
}

}  // namespace millrace::cpu
