#include "isa.h"

#include <cstdlib>
#include <stdexcept>

namespace ropeway {

extern const Kernels kScalarKernels;
#ifdef ROPEWAY_HAS_AVX2
extern const Kernels kAvx2Kernels;
#endif
#ifdef ROPEWAY_HAS_AVX512
extern const Kernels kAvx512Kernels;
#endif

namespace {

// Tables this machine can run, best first. The compiler's check covers the operating system's saving of the registers.
std::vector<const Kernels*> supported_tables() {
  std::vector<const Kernels*> tables;
#ifdef ROPEWAY_HAS_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    tables.push_back(&kAvx512Kernels);
  }
#endif
#ifdef ROPEWAY_HAS_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    tables.push_back(&kAvx2Kernels);
  }
#endif
  tables.push_back(&kScalarKernels);
  return tables;
}

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Kernels* table : supported_tables()) names.emplace_back(table->name);
  return names;
}

const Kernels& select_kernels(std::optional<std::string_view> name) {
  std::string source = "instruction set";
  if (!name) {
    const char* forced = std::getenv("ROPEWAY_ISA");
    if (!forced || !*forced) return *supported_tables().front();
    name = forced;
    source = "ROPEWAY_ISA: instruction set";
  }
  std::string known;
  for (const Kernels* table : supported_tables()) {
    if (*name == table->name) return *table;
    known += (known.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument(source + " '" + std::string(*name) +
                              "' is unknown or not supported by this machine; supported: " + known);
}

}  // namespace ropeway
