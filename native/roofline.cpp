#include "roofline.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>

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

// Explicit registers, so that this file needs no instruction-set flags. Values stay zero: the ports do not mind.
double peak_int8_per_s(ThreadPool& pool, double seconds) {
  return kIterations * 8.0 * 32 * rate_on_all(pool, seconds, [](int) {
           long n = kIterations;
           asm volatile(
               "vpxor %%xmm15, %%xmm15, %%xmm15\n"
               "vpxor %%xmm0, %%xmm0, %%xmm0\n vpxor %%xmm1, %%xmm1, %%xmm1\n"
               "vpxor %%xmm2, %%xmm2, %%xmm2\n vpxor %%xmm3, %%xmm3, %%xmm3\n"
               ".p2align 5\n"
               "1:\n"
               "vpmaddubsw %%ymm15, %%ymm15, %%ymm4\n vpmaddubsw %%ymm15, %%ymm15, %%ymm5\n"
               "vpmaddubsw %%ymm15, %%ymm15, %%ymm6\n vpmaddubsw %%ymm15, %%ymm15, %%ymm7\n"
               "vpaddw %%ymm4, %%ymm0, %%ymm0\n vpaddw %%ymm5, %%ymm1, %%ymm1\n"
               "vpaddw %%ymm6, %%ymm2, %%ymm2\n vpaddw %%ymm7, %%ymm3, %%ymm3\n"
               "vpmaddubsw %%ymm15, %%ymm15, %%ymm8\n vpmaddubsw %%ymm15, %%ymm15, %%ymm9\n"
               "vpmaddubsw %%ymm15, %%ymm15, %%ymm10\n vpmaddubsw %%ymm15, %%ymm15, %%ymm11\n"
               "vpaddw %%ymm8, %%ymm0, %%ymm0\n vpaddw %%ymm9, %%ymm1, %%ymm1\n"
               "vpaddw %%ymm10, %%ymm2, %%ymm2\n vpaddw %%ymm11, %%ymm3, %%ymm3\n"
               "dec %0\n jnz 1b\n vzeroupper\n"
               : "+r"(n)
               :
               : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                 "xmm15");
         });
}

double peak_f32_per_s(ThreadPool& pool, double seconds) {
  return kIterations * 12.0 * 8 * rate_on_all(pool, seconds, [](int) {
           long n = kIterations;
           asm volatile(
               "vpxor %%xmm15, %%xmm15, %%xmm15\n"
               "vpxor %%xmm0, %%xmm0, %%xmm0\n vpxor %%xmm1, %%xmm1, %%xmm1\n vpxor %%xmm2, %%xmm2, %%xmm2\n"
               "vpxor %%xmm3, %%xmm3, %%xmm3\n vpxor %%xmm4, %%xmm4, %%xmm4\n vpxor %%xmm5, %%xmm5, %%xmm5\n"
               "vpxor %%xmm6, %%xmm6, %%xmm6\n vpxor %%xmm7, %%xmm7, %%xmm7\n vpxor %%xmm8, %%xmm8, %%xmm8\n"
               "vpxor %%xmm9, %%xmm9, %%xmm9\n vpxor %%xmm10, %%xmm10, %%xmm10\n vpxor %%xmm11, %%xmm11, %%xmm11\n"
               ".p2align 5\n"
               "1:\n"
               "vfmadd231ps %%ymm15, %%ymm15, %%ymm0\n vfmadd231ps %%ymm15, %%ymm15, %%ymm1\n"
               "vfmadd231ps %%ymm15, %%ymm15, %%ymm2\n vfmadd231ps %%ymm15, %%ymm15, %%ymm3\n"
               "vfmadd231ps %%ymm15, %%ymm15, %%ymm4\n vfmadd231ps %%ymm15, %%ymm15, %%ymm5\n"
               "vfmadd231ps %%ymm15, %%ymm15, %%ymm6\n vfmadd231ps %%ymm15, %%ymm15, %%ymm7\n"
               "vfmadd231ps %%ymm15, %%ymm15, %%ymm8\n vfmadd231ps %%ymm15, %%ymm15, %%ymm9\n"
               "vfmadd231ps %%ymm15, %%ymm15, %%ymm10\n vfmadd231ps %%ymm15, %%ymm15, %%ymm11\n"
               "dec %0\n jnz 1b\n vzeroupper\n"
               : "+r"(n)
               :
               : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                 "xmm15");
         });
}

#else

double peak_int8_per_s(ThreadPool&, double) { throw std::runtime_error("port peaks are measured on x86-64 only"); }
double peak_f32_per_s(ThreadPool&, double) { throw std::runtime_error("port peaks are measured on x86-64 only"); }

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
