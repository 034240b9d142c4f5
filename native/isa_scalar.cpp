// The kernels for any machine.
// clang-format off
#include "vec/scalar.h"
#include "vec/pair.h"
#include "kernels/table.h"
// clang-format on

namespace ropeway {

extern const Kernels kScalarKernels;
constexpr Kernels kScalarKernels = kernel_table("scalar");

}  // namespace ropeway
