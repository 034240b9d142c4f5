// One pool of threads for everything native. Work is a list of phases, each a number of chunks; chunks of a phase run
// in any order on any thread, phases run one after another. A thread that is descheduled between chunks delays nobody:
// a phase ends when its chunks are done, not when every thread has arrived.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace ropeway {

// Processors this process may run on.
int available_cpus();

class ThreadPool {
 public:
  // num_threads counts the caller of `run`, which takes part. Throws std::system_error where there cannot be so many.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs body(phase, chunk, thread) for every chunk in [0, num_chunks[phase]) of every phase, in phase order. One
  // caller at a time; body must not throw. Where end_ns is given, it receives the time (monotonic clock) at which each
  // phase ended.
  template <class Body>
  void run(const int32_t* num_chunks, int num_phases, Body&& body, int64_t* end_ns = nullptr) {
    run(num_chunks, num_phases, std::forward<Body>(body), [](int, int, auto&&) {}, end_ns);
  }

  // The same; a thread that has to wait for others to finish a phase first calls waits(phase, thread, is_done), which
  // should return once is_done().
  template <class Body, class Waits>
  void run(const int32_t* num_chunks, int num_phases, Body&& body, Waits&& waits, int64_t* end_ns) {
    auto both = std::make_pair(&body, &waits);
    using Both = decltype(both);
    run_job({[](void* context, int phase, int chunk, int thread) {
               (*static_cast<Both*>(context)->first)(phase, chunk, thread);
             },
             [](void* context, int phase, int thread, const IsDone& is_done) {
               (*static_cast<Both*>(context)->second)(phase, thread, is_done);
             },
             &both, num_chunks, num_phases, end_ns});
  }

  // Runs body(chunk, thread) for every chunk in [0, num_chunks).
  template <class Body>
  void parallel_for(int32_t num_chunks, Body&& body) {
    run(&num_chunks, 1, [&](int, int chunk, int thread) { body(chunk, thread); });
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int32_t> claimed{0};
    std::atomic<int32_t> done{0};
  };
  // Whether a phase is.
  struct IsDone {
    const Counter& counter;
    int32_t num_chunks;
    bool operator()() const { return counter.done.load(std::memory_order_acquire) >= num_chunks; }
  };
  struct Job {
    void (*call)(void* context, int phase, int chunk, int thread) = nullptr;
    void (*wait)(void* context, int phase, int thread, const IsDone& is_done) = nullptr;
    void* context = nullptr;
    const int32_t* num_chunks = nullptr;
    int num_phases = 0;
    int64_t* end_ns = nullptr;
  };

  void stop();
  void run_job(const Job& job);
  void work_loop(int thread);
  void work(int thread);
  template <class Done>
  void spin_until(Done&& is_done) const;

  const int num_threads_;
  int num_spins_ = 0;  // pauses before a waiting thread goes to sleep
  Job job_;
  std::unique_ptr<Counter[]> counters_;
  int num_counters_ = 0;
  alignas(64) std::atomic<int32_t> current_phase_{0};  // every earlier phase is done
  alignas(64) std::atomic<uint32_t> generation_{0};    // changes when there is news for the workers
  alignas(64) std::atomic<uint32_t> gate_{0};          // kOpen | workers inside the job
  std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace ropeway
