#pragma once
#include <nanobind/nanobind.h>

namespace ropeway {

// Adds `Sampler` to the module; `ThreadPool` is bound before.
void bind_sampler(nanobind::module_& m);

}  // namespace ropeway
