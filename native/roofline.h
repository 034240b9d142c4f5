// What the machine can do at most, measured: multiply-add rates of the vector ports and read bandwidth. Knows no
// kernels.
#pragma once
#include <cstddef>

#include "thread_pool.h"

namespace ropeway {

// Multiply-adds per second over all threads of the pool for about `seconds`, from loops whose operands are all
// registers: int8 (vpmaddubsw + vpaddw, 32 per pair) and float32 (vfmadd231ps, 8 each). Needs AVX2 and FMA.
double peak_int8_per_s(ThreadPool& pool, double seconds);
double peak_f32_per_s(ThreadPool& pool, double seconds);

// Bytes per second that all threads together read from num_bytes of memory, each its own part in order.
double read_bytes_per_s(ThreadPool& pool, size_t num_bytes, double seconds);

}  // namespace ropeway
