#include "sampler.h"

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
                        std::unique_ptr<uint64_t[]>(new uint64_t[num_chunks])});
  }
}

void Sampler::sample(const std::vector<SampleRow>& rows, SampleDraw* draws) {
  auto sample_one = [&](int row, int thread) {
    const Buffers& own = buffers_[thread];
    const SampleScratch scratch{own.counts.get(), own.weights.get(),   own.ids.get(),
                                own.keys.get(),   own.chunk_max.get(), own.chunk_sums.get()};
    draws[row] = kernels_.sample_row(rows[row], scratch);
  };
  if (rows.size() == 1) {
    sample_one(0, 0);  // not worth waking anybody
  } else {
    pool_.parallel_for(int32_t(rows.size()), sample_one);
  }
}

}  // namespace ropeway
