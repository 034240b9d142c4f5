#pragma once
#include <nanobind/nanobind.h>

#include "row_store.h"

namespace ropeway {

// The rows of a step as Python holds them.
struct BoundRows {
  StepRows rows;
  nanobind::object layer_slice;  // as it was given; None where there is none
};

// What the rows of a StepRows drew. numpy's arrays of it are made where they are asked for: each takes some 10 us where
// a pass has just had the caches.
struct StepDraws {
  std::vector<SampleDraw> draws;
};

// Adds `RowStore` and `StepRows` to the module.
void bind_rows(nanobind::module_& m);

}  // namespace ropeway
