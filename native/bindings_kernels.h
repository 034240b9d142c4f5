// Bare kernels for tests and measurements: one product at a time, any supported instruction set by name.
#pragma once
#include <nanobind/nanobind.h>

namespace ropeway {

void bind_kernels(nanobind::module_& m);

}  // namespace ropeway
