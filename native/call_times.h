// What calls from Python took, and the work that they did. Knows no Python.
#pragma once
#include <chrono>
#include <cstdint>

namespace ropeway {

inline int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// native_ns: without the interpreter lock. lock_wait_ns: from the end of that until the lock was had again.
struct CallTimes {
  int64_t native_ns = 0;
  int64_t lock_wait_ns = 0;
};

// Since the start. Multiply-adds on the int8 ports (products with quantised weights) and on the float32 ones (products
// with float weights, attention); bytes of weights, keys and values that had to be read, each once per pass.
struct Work {
  int64_t int8_multiply_adds = 0;
  int64_t f32_multiply_adds = 0;
  int64_t bytes_read = 0;
};

}  // namespace ropeway
