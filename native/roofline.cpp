#include "roofline.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "memory.h"

namespace ropeway {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs body(thread) on every thread of the pool at once until `seconds` have passed; the sum of calls per second.
template <class Body>
double rate_on_all(ThreadPool& pool, double seconds, Body body) {
  const int n = pool.num_threads();
  std::atomic<int> num_arrived{0};
  std::unique_ptr<double[]> rates(new double[n]);
  pool.parallel_for(n, [&](int part, int) {
    num_arrived++;
    while (num_arrived < n) {
    }
    const auto start = Clock::now();
    double elapsed = 0;
    long calls = 0;
    do {
      body(part);
      calls++;
    } while ((elapsed = seconds_since(start)) < seconds);
    rates[part] = double(calls) / elapsed;
  });
  double sum = 0;
  for (int i = 0; i < n; i++) sum += rates[i];
  return sum;
}

constexpr long kIterations = 100000;

}  // namespace

#if defined(__x86_64__)

// Explicit registers and no memory operand, so that this file needs no instruction-set flags. Values stay zero: the
// ports do not mind.
#define CLEAR(n) "vpxor %%xmm" #n ", %%xmm" #n ", %%xmm" #n "\n"
#define TWELVE(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
// 100,000 passes over the instructions.
#define RUN(INSTRUCTIONS)                                                                                         \
  [](int) {                                                                                                       \
    long n = kIterations;                                                                                         \
    asm volatile(TWELVE(CLEAR) CLEAR(15) ".p2align 5\n1:\n" INSTRUCTIONS "dec %0\n jnz 1b\n vzeroupper\n"         \
                 : "+r"(n)                                                                                        \
                 :                                                                                                \
                 : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
                   "xmm11", "xmm15");                                                                             \
  }
#define MULTIPLY_PAIRS(n) "vpmaddubsw %%ymm15, %%ymm15, %%ymm" #n "\n"
#define ADD_PAIRS(from, to) "vpaddw %%ymm" #from ", %%ymm" #to ", %%ymm" #to "\n"
#define DOT_FOURS(n) "vpdpbusd %%zmm15, %%zmm15, %%zmm" #n "\n"
#define FMA_256(n) "vfmadd231ps %%ymm15, %%ymm15, %%ymm" #n "\n"
#define FMA_512(n) "vfmadd231ps %%zmm15, %%zmm15, %%zmm" #n "\n"

namespace {

[[noreturn]] void refuse(std::string_view isa) {
  throw std::invalid_argument("the port peaks of instruction set '" + std::string(isa) + "' are not known");
}

}  // namespace

double peak_int8_per_s(ThreadPool& pool, std::string_view isa, double seconds) {
  if (isa == "avx512") return kIterations * 12.0 * 64 * rate_on_all(pool, seconds, RUN(TWELVE(DOT_FOURS)));
  if (isa != "avx2") refuse(isa);
  return kIterations * 8.0 * 32 *
         rate_on_all(
             pool, seconds,
             RUN(MULTIPLY_PAIRS(4) MULTIPLY_PAIRS(5) MULTIPLY_PAIRS(6) MULTIPLY_PAIRS(7) ADD_PAIRS(4, 0) ADD_PAIRS(5, 1)
                     ADD_PAIRS(6, 2) ADD_PAIRS(7, 3) MULTIPLY_PAIRS(8) MULTIPLY_PAIRS(9) MULTIPLY_PAIRS(10)
                         MULTIPLY_PAIRS(11) ADD_PAIRS(8, 0) ADD_PAIRS(9, 1) ADD_PAIRS(10, 2) ADD_PAIRS(11, 3)));
}

double peak_f32_per_s(ThreadPool& pool, std::string_view isa, double seconds) {
  if (isa == "avx512") return kIterations * 12.0 * 16 * rate_on_all(pool, seconds, RUN(TWELVE(FMA_512)));
  if (isa != "avx2") refuse(isa);
  return kIterations * 12.0 * 8 * rate_on_all(pool, seconds, RUN(TWELVE(FMA_256)));
}

#else

double peak_int8_per_s(ThreadPool&, std::string_view, double) {
  throw std::runtime_error("port peaks are measured on x86-64 only");
}
double peak_f32_per_s(ThreadPool&, std::string_view, double) {
  throw std::runtime_error("port peaks are measured on x86-64 only");
}

#endif

double read_bytes_per_s(ThreadPool& pool, size_t num_bytes, double seconds) {
  const int n = pool.num_threads();
  const size_t words = num_bytes / 8 / n / 8 * 8;  // of each thread
  const Memory<uint64_t> memory = allocate<uint64_t>(static_cast<int64_t>(words) * n);
  std::fill_n(memory.get(), words * n, uint64_t(1));
  std::atomic<uint64_t> sink{0};
  double passes = rate_on_all(pool, seconds, [&](int part) {
    const uint64_t* p = memory.get() + part * words;
    uint64_t sum[8] = {};
    for (size_t i = 0; i < words; i += 8) {
      __builtin_prefetch(p + i + 128);
      for (int j = 0; j < 8; j++) sum[j] += p[i + j];
    }
    uint64_t total = 0;
    for (uint64_t s : sum) total += s;
    sink += total;
  });
  return passes * double(words) * 8;
}

}  // namespace ropeway
