// AVX2, FMA and F16C, compiled with their flags: nothing here may have external linkage but the table.
#ifdef ROPEWAY_HAS_AVX2
// clang-format off
#include "vec/avx2.h"
#include "vec/pair.h"
#include "kernels/table.h"
// clang-format on

namespace ropeway {

extern const Kernels kAvx2Kernels;
constexpr Kernels kAvx2Kernels = kernel_table("avx2");

}  // namespace ropeway
#endif
