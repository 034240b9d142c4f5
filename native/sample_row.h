// What the sampling kernel reads and writes: one row of logits, its parameters, and the scratch of a thread.
#pragma once
#include <cstdint>

namespace ropeway {

constexpr int kSampleChunk = 64;              // logits that share one maximum and one sum of weights
constexpr int32_t kMaxSampleVocab = 1 << 22;  // sums of weights stay below 2^53: exact as a double too

// One row of a SampleBatch (backends/batch.py, which gives the meaning of each field).
struct SampleRow {
  float* logits;  // [vocab_size]; biases, masks and penalties are applied in place
  int32_t vocab_size;
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  uint64_t seed;
  int32_t index, position;
  float repetition_penalty, presence_penalty, frequency_penalty;
  const int32_t* history;  // num_tokens ids, the prompt first
  int32_t num_prompt_tokens, num_tokens;
  const int32_t* bias_ids;
  const float* bias_values;
  int32_t num_biases;
  const int32_t* banned_ids;
  int32_t num_banned;
  const uint32_t*
      mask;  // [ceil(vocab_size / 32)], a bit per token, low bits first: only these may be drawn; may be null

  bool is_adjusted() const {
    return num_biases || num_banned || mask || repetition_penalty != 1.0f || presence_penalty != 0.0f ||
           frequency_penalty != 0.0f;
  }
};

// What is asked of one row of raw logits: the log-probability and rank (1 is the likeliest) of a token, and the num_top
// likeliest tokens, likeliest first, of equals the lowest id.
struct LogprobRow {
  const float* logits;  // [vocab_size]
  int32_t vocab_size, token_id, num_top;
  float* logprob;
  int32_t* rank;
  int32_t* top_ids;     // [num_top], num_top <= vocab_size
  float* top_logprobs;  // [num_top]
};

// Of one thread. `counts` is all zero between rows; the rest holds nothing.
struct SampleScratch {
  uint32_t* counts;      // [vocab_size]
  uint32_t* weights;     // [vocab_size]
  int32_t* ids;          // [vocab_size]
  int32_t* keys;         // [vocab_size]
  int32_t* chunk_max;    // [ceil(vocab_size / kSampleChunk)]
  uint64_t* chunk_sums;  // [ceil(vocab_size / kSampleChunk)]
};

// total_weight: sum of the survivors' integer weights; 0 where none was needed (greedy, or a failed row).
struct SampleDraw {
  int32_t token_id;
  bool is_failed;
  uint64_t total_weight;
};

}  // namespace ropeway
