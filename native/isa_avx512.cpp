// AVX-512 F, BW, DQ, VL and VNNI, compiled with their flags: nothing here may have external linkage but the table.
#ifdef ROPEWAY_HAS_AVX512
// clang-format off
#include "vec/avx2.h"
#include "vec/avx512.h"
#include "kernels/table.h"
// clang-format on

namespace ropeway {

extern const Kernels kAvx512Kernels;
constexpr Kernels kAvx512Kernels = kernel_table("avx512");

}  // namespace ropeway
#endif
