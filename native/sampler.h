// Draws one token from each of many rows of logits: scratch per thread, rows shared over the pool. Knows no model.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "call_times.h"
#include "kernels.h"
#include "sample_row.h"
#include "thread_pool.h"

namespace ropeway {

class Sampler {
 public:
  // Throws std::invalid_argument for a vocab_size outside 1..kMaxSampleVocab. The pool outlives the sampler.
  Sampler(const Kernels& kernels, ThreadPool& pool, int32_t vocab_size);
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  CallTimes last_call;  // written by whoever holds the interpreter lock around `sample`

  int32_t vocab_size() const { return vocab_size_; }

  // draws[i] is of rows[i]. Every id of a row is below vocab_size, which is the sampler's. logprobs: empty, or one
  // entry per row, used where its `logprob` is set: of the logits as they came, and of the token drawn.
  void sample(const std::vector<SampleRow>& rows, std::vector<LogprobRow>& logprobs, SampleDraw* draws);

  // Fills the outputs of every row.
  void score(const std::vector<LogprobRow>& rows);

 private:
  struct Buffers {
    std::unique_ptr<uint32_t[]> counts, weights;
    std::unique_ptr<int32_t[]> ids, keys, chunk_max;
    std::unique_ptr<uint64_t[]> chunk_sums;
    std::unique_ptr<float[]> raw;  // a row's logits before they are changed

    SampleScratch scratch() const {
      return {counts.get(), weights.get(), ids.get(), keys.get(), chunk_max.get(), chunk_sums.get()};
    }
  };

  template <class Work>
  void for_each_row(size_t num_rows, Work&& work);

  const Kernels& kernels_;
  ThreadPool& pool_;
  const int32_t vocab_size_;
  std::vector<Buffers> buffers_;  // by thread of the pool
};

}  // namespace ropeway
