// Native work without the interpreter lock, timed.
#pragma once
#include <nanobind/nanobind.h>

#include "call_times.h"

namespace ropeway {

template <class Work>
CallTimes call_released(Work&& work) {
  const int64_t start_ns = steady_ns();
  int64_t end_ns;
  {
    nanobind::gil_scoped_release released;
    work();
    end_ns = steady_ns();
  }
  return {end_ns - start_ns, steady_ns() - end_ns};
}

}  // namespace ropeway
