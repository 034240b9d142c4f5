// Log-probabilities of one row of raw logits. Written over vec/*.h, kernels/math.h and kernels/sample.h.
#pragma once

namespace ropeway {
namespace {

// ln(sum of exp(x[i] - max)); float32 within a chunk, double between chunks, in ascending order.
inline double log_sum(const float* x, int32_t size, float max) {
  const F32x8 top = set_f32(max), scale = set_f32(kLog2E);
  double total = 0;
  for (int32_t begin = 0; begin < size; begin += kSampleChunk) {
    const int32_t end = size - begin < kSampleChunk ? size : begin + kSampleChunk;
    F32x8 sum = zero_f32();
    int32_t i = begin;
    for (; i + 8 <= end; i += 8) sum = add(sum, exp2_f32_below(mul(sub(load_f32(x + i), top), scale)));
    float part = reduce_add_f32(sum);
    for (; i < end; ++i) part += first_lane(exp2_f32_below(mul(set_f32(x[i] - max), scale)));
    total += part;
  }
  return __builtin_log(total);
}

// The row's num_top likeliest ids, in order; those of -inf come last, by id.
void find_top(const LogprobRow& row, const SampleScratch& scratch) {
  SampleRow as_sampled{};
  as_sampled.logits = const_cast<float*>(row.logits);  // read only by top_k_candidates
  as_sampled.vocab_size = row.vocab_size;
  as_sampled.temperature = 1.0f;
  as_sampled.top_k = row.num_top;
  const Candidates found = top_k_candidates(as_sampled, kFloatMax, 0, scratch);
  for (int32_t i = 0; i < found.n; ++i) {  // ids ascend, so an equal key stays behind
    int32_t at = i;
    const int32_t id = found.ids[i], key = found.keys[i];
    for (; at > 0 && found.keys[at - 1] < key; --at) {
      found.keys[at] = found.keys[at - 1];
      row.top_ids[at] = row.top_ids[at - 1];
    }
    found.keys[at] = key;
    row.top_ids[at] = id;
  }
  for (int32_t id = 0, n = found.n; n < row.num_top; ++id) {
    if (order_key(row.logits[id]) <= kKeyMasked) row.top_ids[n++] = id;
  }
}

void logprob_row(const LogprobRow& row, const SampleScratch& scratch) {
  const int32_t row_max = find_max(row.logits, row.vocab_size, nullptr, scratch.chunk_max);
  if (row_max == kKeyMasked) {
    *row.logprob = __builtin_nanf("");
    *row.rank = 1;
    for (int32_t i = 0; i < row.num_top; ++i) row.top_ids[i] = i, row.top_logprobs[i] = __builtin_nanf("");
    return;
  }
  const float max = float_of_key(row_max), x = row.logits[row.token_id];
  const double log_total = log_sum(row.logits, row.vocab_size, max);
  int32_t num_above = 0;
  for (int32_t i = 0; i < row.vocab_size; ++i) num_above += row.logits[i] > x;
  *row.rank = num_above + 1;
  *row.logprob = float(double(x) - double(max) - log_total);
  if (row.num_top == 0) return;
  find_top(row, scratch);
  for (int32_t i = 0; i < row.num_top; ++i) {
    row.top_logprobs[i] = float(double(row.logits[row.top_ids[i]]) - double(max) - log_total);
  }
}

}  // namespace
}  // namespace ropeway
