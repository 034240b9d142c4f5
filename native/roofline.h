// What the machine can do at most, measured: multiply-add rates of the vector ports and read bandwidth. Knows no
// kernels.
#pragma once
#include <cstddef>
#include <string_view>

#include "thread_pool.h"

namespace ropeway {

// Multiply-adds per second over all threads of the pool for about `seconds`, from loops whose operands are all
// registers: int8 (avx2: vpmaddubsw + vpaddw, 32 per pair; avx512: vpdpbusd, 64 each) and float32 (vfmadd231ps, 8 or 16
// each). isa names one of the two, which this machine must have; std::invalid_argument for another.
double peak_int8_per_s(ThreadPool& pool, std::string_view isa, double seconds);
double peak_f32_per_s(ThreadPool& pool, std::string_view isa, double seconds);

// Bytes per second that all threads together read from num_bytes of memory, each its own part in order.
double read_bytes_per_s(ThreadPool& pool, size_t num_bytes, double seconds);

}  // namespace ropeway
