// The Python module: each part binds itself.
#include <nanobind/nanobind.h>

#include "bindings_kernels.h"
#include "thread_pool.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.def("available_cpus", &ropeway::available_cpus, "Processors this process may run on.");
  ropeway::bind_kernels(m);
}
