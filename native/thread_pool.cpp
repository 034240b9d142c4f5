#include "thread_pool.h"

#include <algorithm>
#include <chrono>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ropeway {
namespace {

constexpr uint32_t kOpen = 1u << 16;
constexpr int64_t kSpinNs = 40'000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#else
  std::this_thread::yield();
#endif
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Pauses that take about kSpinNs on this processor (a pause takes from a few to some 140 cycles, by model).
int calibrate_spins() {
  int64_t best_ns = INT64_MAX;
  for (int trial = 0; trial < 3; ++trial) {
    const int64_t start = now_ns();
    for (int i = 0; i < 256; ++i) pause();
    best_ns = std::min(best_ns, now_ns() - start);
  }
  return static_cast<int>(std::clamp<int64_t>(kSpinNs * 256 / std::max<int64_t>(best_ns, 1), 16, 100'000));
}

}  // namespace

int available_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(std::max(1, num_threads)) {
  if (num_threads_ > 1) num_spins_ = calibrate_spins();
  try {
    for (int thread = 1; thread < num_threads_; ++thread) workers_.emplace_back([this, thread] { work_loop(thread); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  is_stopping_.store(true);
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

template <class Done>
void ThreadPool::spin_until(Done&& is_done) const {
  for (int i = 0; i < num_spins_ && !is_done(); ++i) pause();
}

void ThreadPool::run_job(const Job& job) {
  if (num_threads_ == 1) {
    for (int phase = 0; phase < job.num_phases; ++phase) {
      for (int chunk = 0; chunk < job.num_chunks[phase]; ++chunk) job.call(job.context, phase, chunk, 0);
      if (job.end_ns) job.end_ns[phase] = now_ns();
    }
    return;
  }
  // Nobody is inside: the gate was closed and drained at the end of the job before.
  if (job.num_phases > num_counters_) {
    counters_ = std::make_unique<Counter[]>(job.num_phases);
    num_counters_ = job.num_phases;
  }
  for (int phase = 0; phase < job.num_phases; ++phase) {
    counters_[phase].claimed.store(0, std::memory_order_relaxed);
    counters_[phase].done.store(0, std::memory_order_relaxed);
  }
  job_ = job;
  current_phase_.store(0, std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  generation_.fetch_add(1);
  generation_.notify_all();
  work(0);
  // Whoever is inside finds every phase done and leaves; who has not entered by now never will.
  uint32_t gate = gate_.fetch_and(~kOpen) & ~kOpen;
  spin_until([&] { return (gate = gate_.load(std::memory_order_acquire)) == 0; });
  while (gate != 0) {
    gate_.wait(gate, std::memory_order_acquire);
    gate = gate_.load(std::memory_order_acquire);
  }
}

void ThreadPool::work_loop(int thread) {
  uint32_t seen = 0;
  for (;;) {
    spin_until([&] { return generation_.load(std::memory_order_acquire) != seen; });
    generation_.wait(seen, std::memory_order_acquire);
    seen = generation_.load(std::memory_order_acquire);
    if (is_stopping_.load()) return;
    uint32_t gate = gate_.load(std::memory_order_acquire);
    while ((gate & kOpen) && !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
    }
    if (!(gate & kOpen)) continue;
    work(thread);
    if (gate_.fetch_sub(1, std::memory_order_acq_rel) == 1)
      gate_.notify_one();  // the caller may sleep for the last to leave
  }
}

void ThreadPool::work(int thread) {
  const Job job = job_;
  for (int phase = current_phase_.load(std::memory_order_acquire); phase < job.num_phases; ++phase) {
    const int32_t num_chunks = job.num_chunks[phase];
    Counter& counter = counters_[phase];
    int32_t num_mine = 0;
    while (counter.claimed.load(std::memory_order_relaxed) < num_chunks) {
      const int32_t chunk = counter.claimed.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= num_chunks) break;
      job.call(job.context, phase, chunk, thread);
      ++num_mine;
    }
    int32_t done = counter.done.load(std::memory_order_acquire);
    if (num_mine > 0) {
      done = counter.done.fetch_add(num_mine, std::memory_order_acq_rel) + num_mine;
      if (done == num_chunks) counter.done.notify_all();
    }
    if (done < num_chunks) {
      const IsDone is_done{counter, num_chunks};
      job.wait(job.context, phase, thread, is_done);
      spin_until(is_done);
      while ((done = counter.done.load(std::memory_order_acquire)) < num_chunks)
        counter.done.wait(done, std::memory_order_acquire);
    }
    if (thread == 0) {
      current_phase_.store(phase + 1, std::memory_order_release);
      if (job.end_ns) job.end_ns[phase] = now_ns();
    }
  }
}

}  // namespace ropeway
