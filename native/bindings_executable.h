#pragma once
#include <nanobind/nanobind.h>

namespace ropeway {

// Adds ThreadPool, RowOp and Executable to the module.
void bind_executable(nanobind::module_& m);

}  // namespace ropeway
