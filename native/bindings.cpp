// The Python module: each part binds itself.
#include <nanobind/nanobind.h>

#include "bindings_executable.h"
#include "bindings_kernels.h"
#include "bindings_rows.h"
#include "bindings_sampler.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  ropeway::bind_executable(m);
  ropeway::bind_rows(m);
  ropeway::bind_kernels(m);
  ropeway::bind_sampler(m);
}
