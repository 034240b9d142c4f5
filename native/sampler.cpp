#include "sampler.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ropeway {

Sampler::Sampler(const Kernels& kernels, ThreadPool& pool, int32_t vocab_size)
    : kernels_(kernels), pool_(pool), vocab_size_(vocab_size) {
  if (vocab_size < 1 || vocab_size > kMaxSampleVocab) {
    throw std::invalid_argument("a vocabulary of " + std::to_string(vocab_size) + " tokens cannot be sampled; 1 to " +
                                std::to_string(kMaxSampleVocab) + " can");
  }
  const size_t size = size_t(vocab_size), num_chunks = (size + kSampleChunk - 1) / kSampleChunk;
  for (int thread = 0; thread < pool.num_threads(); ++thread) {
    // Only the counts start from zero; the rest stays untouched, and takes no memory, until a row needs it.
    buffers_.push_back({std::make_unique<uint32_t[]>(size), std::unique_ptr<uint32_t[]>(new uint32_t[size]),
                        std::unique_ptr<int32_t[]>(new int32_t[size]), std::unique_ptr<int32_t[]>(new int32_t[size]),
                        std::unique_ptr<int32_t[]>(new int32_t[num_chunks]),
                        std::unique_ptr<uint64_t[]>(new uint64_t[num_chunks]),
                        std::unique_ptr<float[]>(new float[size])});
  }
}

template <class Work>
void Sampler::for_each_row(size_t num_rows, Work&& work) {
  if (num_rows == 1) {
    work(0, 0);  // not worth waking anybody
  } else {
    pool_.parallel_for(int32_t(num_rows), work);
  }
}

void Sampler::sample(const std::vector<SampleRow>& rows, std::vector<LogprobRow>& logprobs, SampleDraw* draws) {
  for_each_row(rows.size(), [&](int row, int thread) {
    const Buffers& own = buffers_[thread];
    const SampleScratch scratch = own.scratch();
    if (logprobs.empty() || !logprobs[row].logprob) {
      draws[row] = kernels_.sample_row(rows[row], scratch);
      return;
    }
    LogprobRow& wanted = logprobs[row];
    wanted.logits = rows[row].logits;
    if (rows[row].is_adjusted()) {
      std::copy_n(rows[row].logits, vocab_size_, own.raw.get());
      wanted.logits = own.raw.get();
    }
    draws[row] = kernels_.sample_row(rows[row], scratch);
    wanted.token_id = draws[row].token_id;
    kernels_.logprob_row(wanted, scratch);
  });
}

void Sampler::score(const std::vector<LogprobRow>& rows) {
  for_each_row(rows.size(), [&](int row, int thread) { kernels_.logprob_row(rows[row], buffers_[thread].scratch()); });
}

}  // namespace ropeway
