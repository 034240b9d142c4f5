// Which instruction sets this machine runs, and the kernel table of each.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"

namespace ropeway {

// Names of the kernel tables this machine can run, best first.
std::vector<std::string> supported_isas();

// The table of that name; without one, of ROPEWAY_ISA if set, else the best. Throws std::invalid_argument, naming what
// is supported, for a set that is unknown or that this machine cannot run.
const Kernels& select_kernels(std::optional<std::string_view> name);

}  // namespace ropeway
