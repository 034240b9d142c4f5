// One token drawn from one row of logits. The definition is backends/reference_sampler.py; this gives the same token.
//
// Likelihoods are integers, so no sum depends on its order. Nothing is sorted: thresholds are selected by radix over
// the bits of the logits, after chunks that cannot hold a survivor were skipped. The loops are plain on purpose: every
// operation is elementwise or an exact reduction over integers, so a compiler may vectorise them for any instruction
// set without changing a bit.
#pragma once

namespace ropeway {
namespace {

constexpr uint32_t kWeightOne = 1u << 30;
constexpr int kStepBits = 21;  // steps of the exponent per octave
constexpr float kStepsPerNat = 0x1.715476p+21f;
constexpr float kMaxSteps = 33.0f * (1 << kStepBits);
constexpr float kFloatMax = 0x1.fffffep+127f;
constexpr int32_t kKeyMax = 0x7f7fffff;               // of the largest float; +inf counts as that
constexpr int32_t kKeyMasked = int32_t(0x807fffffu);  // of -inf
constexpr uint32_t kInPrompt = 1u << 31;              // in SampleScratch::counts

// Signed integers in the order of the floats; -0 counts as +0.
inline int32_t order_key(float x) {
  const int32_t bits = __builtin_bit_cast(int32_t, x + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float float_of_key(int32_t key) { return __builtin_bit_cast(float, key ^ ((key >> 31) & 0x7fffffff)); }

inline int32_t min_key(int32_t a, int32_t b) { return a < b ? a : b; }

// round(2^30 * exp((x - max) / temperature)); max is finite and no less than x.
inline uint32_t token_weight(float x, float max, float temperature) {
  const float capped = x < kFloatMax ? x : kFloatMax;
  float steps = (max - capped) / temperature * kStepsPerNat;
  steps = steps < kMaxSteps ? steps : kMaxSteps;
  const int32_t distance = int32_t(steps + 0.5f);
  const int32_t octaves = (distance + (1 << kStepBits) - 1) >> kStepBits;
  const float z = float((octaves << kStepBits) - distance) * (1.0f / (1 << kStepBits));
  // 2^(23 + z) for z in [0, 1)
  float mantissa = 1813.0230712890625f;
  mantissa = mantissa * z + 10458.7861328125f;
  mantissa = mantissa * z + 81163.5703125f;
  mantissa = mantissa * z + 465444.28125f;
  mantissa = mantissa * z + 2015189.5f;
  mantissa = mantissa * z + 5814539.0f;
  mantissa = mantissa * z + 8388608.0f;
  const float unit = __builtin_bit_cast(float, (127 + 7 - octaves) << 23);  // 2^(7 - octaves)
  return uint32_t(int32_t(mantissa * unit + 0.5f));
}

// Two words of Philox4x32-10 (Salmon et al., SC 2011).
inline uint64_t uniform_bits(uint64_t seed, uint32_t index, uint32_t position) {
  uint32_t c0 = position, c1 = index, c2 = 0, c3 = 0, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(0xD2511F53u) * c0, product1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(product1);
    c2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0 | uint64_t(c1) << 32;
}

// floor(total * bits / 2^64): uniform over [0, total).
inline uint64_t scaled_down(uint64_t bits, uint64_t total) { return uint64_t((unsigned __int128)bits * total >> 64); }

void apply_penalties(const SampleRow& row, uint32_t* counts) {
  for (int32_t i = 0; i < row.num_prompt_tokens; ++i) counts[row.history[i]] |= kInPrompt;
  for (int32_t i = row.num_prompt_tokens; i < row.num_tokens; ++i) ++counts[row.history[i]];
  for (int32_t i = 0; i < row.num_tokens; ++i) {
    const int32_t id = row.history[i];
    const uint32_t count = counts[id];
    if (count == 0) continue;  // done before
    counts[id] = 0;
    float x = row.logits[id];
    x = x > 0 ? x / row.repetition_penalty : x * row.repetition_penalty;
    if (const uint32_t num_generated = count & ~kInPrompt) {
      x -= row.frequency_penalty * float(num_generated);
      x -= row.presence_penalty;
    }
    row.logits[id] = x;
  }
}

inline int32_t chunk_size(int32_t vocab_size, int32_t chunk) {
  const int32_t rest = vocab_size - chunk * kSampleChunk;
  return rest < kSampleChunk ? rest : kSampleChunk;
}

// Whether the mask leaves nothing of a chunk. Such chunks are neither written nor read: grammars often allow a handful
// of tokens, and going over all of the row costs more than the rest of the draw.
inline bool is_masked_out(const uint32_t* mask, int32_t vocab_size, int32_t chunk) {
  if (!mask) return false;
  const uint32_t* words = mask + chunk * (kSampleChunk / 32);
  return words[0] == 0 && (chunk_size(vocab_size, chunk) <= 32 || words[1] == 0);
}

void apply_mask(const SampleRow& row) {
  for (int32_t begin = 0, word = 0; begin < row.vocab_size; begin += 32, ++word) {
    if (is_masked_out(row.mask, row.vocab_size, begin / kSampleChunk)) continue;
    const uint32_t bits = row.mask[word];
    const int32_t size = row.vocab_size - begin < 32 ? row.vocab_size - begin : 32;
    float* x = row.logits + begin;
    if (bits == 0) {
      for (int32_t i = 0; i < size; ++i) x[i] = -__builtin_inff();
    } else if (bits != 0xffffffffu) {
      for (int32_t i = 0; i < size; ++i) x[i] = bits >> i & 1 ? x[i] : -__builtin_inff();
    }
  }
}

void adjust_logits(const SampleRow& row, uint32_t* counts) {
  for (int32_t i = 0; i < row.num_biases; ++i) row.logits[row.bias_ids[i]] += row.bias_values[i];
  for (int32_t i = 0; i < row.num_banned; ++i) row.logits[row.banned_ids[i]] = -__builtin_inff();
  if (row.mask) apply_mask(row);
  if (row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f) {
    apply_penalties(row, counts);
  }
}

// The largest key and the largest magnitude of x[size].
inline void chunk_extremes(const float* x, int32_t size, int32_t& key_max, int32_t& magnitude_max) {
  int32_t max = kKeyMasked, magnitude = 0;
  for (int32_t i = 0; i < size; ++i) {
    const int32_t key = order_key(x[i]), bits = __builtin_bit_cast(int32_t, x[i]) & 0x7fffffff;
    max = key > max ? key : max;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  key_max = min_key(max, kKeyMax);
  magnitude_max = magnitude > magnitude_max ? magnitude : magnitude_max;
}

// The largest key of each chunk and of the row; kKeyMasked if there is a NaN. mask: may be null.
int32_t find_max(const float* logits, int32_t vocab_size, const uint32_t* mask, int32_t* chunk_max) {
  const int32_t num_chunks = (vocab_size + kSampleChunk - 1) / kSampleChunk;
  int32_t magnitude = 0, row_max = kKeyMasked;
  for (int32_t c = 0; c < num_chunks; ++c) {
    const float* x = logits + c * kSampleChunk;
    if (is_masked_out(mask, vocab_size, c)) {
      chunk_max[c] = kKeyMasked;
    } else if (const int32_t size = chunk_size(vocab_size, c); size == kSampleChunk) {
      chunk_extremes(x, kSampleChunk, chunk_max[c], magnitude);  // a length known here is worth a loop of its own
    } else {
      chunk_extremes(x, size, chunk_max[c], magnitude);
    }
    row_max = chunk_max[c] > row_max ? chunk_max[c] : row_max;
  }
  return magnitude > 0x7f800000 ? kKeyMasked : row_max;
}

// The first token with the largest key.
int32_t first_largest(const SampleRow& row, int32_t row_max, const int32_t* chunk_max) {
  int32_t chunk = 0;
  while (chunk_max[chunk] != row_max) ++chunk;
  int32_t id = chunk * kSampleChunk;
  while (order_key(row.logits[id]) < row_max) ++id;
  return id;
}

// Largest first, the key at which the mass (of `masses`, or 1 each) reaches `needed`; the sum is no less than needed.
// `needed` becomes what the entries with exactly that key must still give.
int32_t select_threshold(const int32_t* keys, const uint32_t* masses, int32_t n, uint64_t& needed) {
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    uint64_t histogram[256] = {};
    for (int32_t i = 0; i < n; ++i) {
      const uint32_t bits = uint32_t(keys[i]) ^ 0x80000000u;
      if ((bits & mask) == prefix) histogram[(bits >> shift) & 255] += masses ? masses[i] : 1;
    }
    uint32_t digit = 255;
    while (histogram[digit] < needed) needed -= histogram[digit--];
    prefix |= digit << shift;
    mask |= 255u << shift;
  }
  return int32_t(prefix ^ 0x80000000u);
}

// The tokens that may survive, ascending by id; `weights` belong to the same places.
struct Candidates {
  int32_t* ids;
  int32_t* keys;
  uint32_t* weights;
  int32_t n;

  // Keeps what lies above the threshold, and of those at it the first that give `needed` (mass as in select_threshold).
  void keep(int32_t threshold, uint64_t needed, bool is_by_weight) {
    int32_t kept = 0;
    for (int32_t i = 0; i < n; ++i) {
      if (keys[i] < threshold || (keys[i] == threshold && needed == 0)) continue;
      if (keys[i] == threshold) {
        const uint64_t mass = is_by_weight ? weights[i] : 1;
        needed = mass < needed ? needed - mass : 0;
      }
      ids[kept] = ids[i];
      keys[kept] = keys[i];
      weights[kept] = weights[i];
      ++kept;
    }
    n = kept;
  }

  uint64_t total() const {
    uint64_t sum = 0;
    for (int32_t i = 0; i < n; ++i) sum += weights[i];
    return sum;
  }
};

uint32_t smallest_weight(const SampleRow& row) {
  const double least = __builtin_ceil(double(row.min_p) * kWeightOne);
  return least < 1.0 ? 1 : uint32_t(least);
}

uint64_t needed_weight(const SampleRow& row, uint64_t total) {
  const double needed = __builtin_ceil(double(row.top_p) * double(total));
  return needed < 1.0 ? 1 : uint64_t(needed);
}

// The top_k tokens, of those that have a weight of at least `least`.
Candidates top_k_candidates(const SampleRow& row, float max, uint32_t least, const SampleScratch& scratch) {
  const int32_t num_chunks = (row.vocab_size + kSampleChunk - 1) / kSampleChunk;
  // The k-th largest of the chunks' maxima is no more than the k-th largest token: a chunk below it is skipped whole.
  int32_t bound = kKeyMasked + 1;
  if (row.top_k <= num_chunks) {
    uint64_t needed = uint64_t(row.top_k);
    const int32_t kth = select_threshold(scratch.chunk_max, nullptr, num_chunks, needed);
    bound = kth > bound ? kth : bound;
  }
  Candidates found{scratch.ids, scratch.keys, scratch.weights, 0};
  for (int32_t c = 0; c < num_chunks; ++c) {
    if (scratch.chunk_max[c] < bound) continue;
    const int32_t begin = c * kSampleChunk;
    const int32_t end = row.vocab_size - begin < kSampleChunk ? row.vocab_size : begin + kSampleChunk;
    for (int32_t id = begin; id < end; ++id) {
      const int32_t key = min_key(order_key(row.logits[id]), kKeyMax);
      found.ids[found.n] = id;
      found.keys[found.n] = key;
      found.n += key >= bound;
    }
  }
  if (found.n > row.top_k) {
    uint64_t needed = uint64_t(row.top_k);
    const int32_t threshold = select_threshold(found.keys, nullptr, found.n, needed);
    found.keep(threshold, needed, false);
  }
  int32_t kept = 0;
  for (int32_t i = 0; i < found.n; ++i) {
    const uint32_t weight = token_weight(row.logits[found.ids[i]], max, row.temperature);
    found.ids[kept] = found.ids[i];
    found.keys[kept] = found.keys[i];
    found.weights[kept] = weight;
    kept += weight >= least;
  }
  found.n = kept;
  return found;
}

// The weights of x[size], 0 where below `least`, and their sum.
inline uint64_t weigh_chunk(const float* x, int32_t size, float max, float temperature, uint32_t least,
                            uint32_t* weights) {
  uint32_t high = 0, low = 0;  // sums of 64 halves of 16 bits: no carry is lost
  for (int32_t i = 0; i < size; ++i) {
    uint32_t weight = token_weight(x[i], max, temperature);
    weight = weight < least ? 0 : weight;
    weights[i] = weight;
    high += weight >> 16;
    low += weight & 0xffff;
  }
  return (uint64_t(high) << 16) + low;
}

// Fills the chunks' sums, and the weights of chunks whose sum is not 0; returns the sum of all.
uint64_t weigh_all(const SampleRow& row, float max, uint32_t least, const SampleScratch& scratch) {
  const int32_t num_chunks = (row.vocab_size + kSampleChunk - 1) / kSampleChunk;
  uint64_t total = 0;
  for (int32_t c = 0; c < num_chunks; ++c) {
    const int32_t at = c * kSampleChunk, size = chunk_size(row.vocab_size, c);
    const float* x = row.logits + at;
    uint32_t* weights = scratch.weights + at;
    uint64_t sum = 0;
    if (size == kSampleChunk && scratch.chunk_max[c] != kKeyMasked) {
      sum = weigh_chunk(x, kSampleChunk, max, row.temperature, least, weights);
    } else if (scratch.chunk_max[c] != kKeyMasked) {
      sum = weigh_chunk(x, size, max, row.temperature, least, weights);
    }
    total += scratch.chunk_sums[c] = sum;
  }
  return total;
}

// The tokens that may be within top_p of `total`. All that are no heavier than `light` come last in the order and weigh
// too little together to be needed.
Candidates top_p_candidates(const SampleRow& row, uint64_t total, const SampleScratch& scratch) {
  const uint64_t light = (total - needed_weight(row, total)) / uint64_t(row.vocab_size);
  Candidates found{scratch.ids, scratch.keys, scratch.weights, 0};
  for (int32_t begin = 0, c = 0; begin < row.vocab_size; begin += kSampleChunk, ++c) {
    if (scratch.chunk_sums[c] <= light) continue;
    const int32_t end = row.vocab_size - begin < kSampleChunk ? row.vocab_size : begin + kSampleChunk;
    for (int32_t id = begin; id < end; ++id) {
      const uint32_t weight = scratch.weights[id];  // read before its place may be taken: found.n <= id
      found.ids[found.n] = id;
      found.keys[found.n] = min_key(order_key(row.logits[id]), kKeyMax);
      found.weights[found.n] = weight;
      found.n += weight > light;
    }
  }
  return found;
}

SampleDraw draw_from(const SampleRow& row, const Candidates& candidates) {
  const uint64_t total = candidates.total();
  uint64_t target = scaled_down(uniform_bits(row.seed, uint32_t(row.index), uint32_t(row.position)), total);
  int32_t i = 0;
  while (target >= candidates.weights[i]) target -= candidates.weights[i++];
  return {candidates.ids[i], false, total};
}

SampleDraw draw_from_all(const SampleRow& row, uint64_t total, const SampleScratch& scratch) {
  uint64_t target = scaled_down(uniform_bits(row.seed, uint32_t(row.index), uint32_t(row.position)), total);
  int32_t chunk = 0;
  while (target >= scratch.chunk_sums[chunk]) target -= scratch.chunk_sums[chunk++];
  int32_t id = chunk * kSampleChunk;
  while (target >= scratch.weights[id]) target -= scratch.weights[id++];
  return {id, false, total};
}

SampleDraw sample_row(const SampleRow& row, const SampleScratch& scratch) {
  adjust_logits(row, scratch.counts);
  const int32_t row_max = find_max(row.logits, row.vocab_size, row.mask, scratch.chunk_max);
  if (row_max == kKeyMasked) return {0, true, 0};
  if (row.temperature == 0.0f) return {first_largest(row, row_max, scratch.chunk_max), false, 0};

  const float max = float_of_key(row_max);
  const uint32_t least = smallest_weight(row);
  Candidates candidates;
  uint64_t total;
  if (row.top_k > 0 && row.top_k < row.vocab_size) {
    candidates = top_k_candidates(row, max, least, scratch);
    if (row.top_p >= 1.0f) return draw_from(row, candidates);
    total = candidates.total();
  } else {
    total = weigh_all(row, max, least, scratch);
    if (row.top_p >= 1.0f) return draw_from_all(row, total, scratch);
    candidates = top_p_candidates(row, total, scratch);
  }
  uint64_t needed = needed_weight(row, total);
  const int32_t threshold = select_threshold(candidates.keys, candidates.weights, candidates.n, needed);
  candidates.keep(threshold, needed, true);
  return draw_from(row, candidates);
}

}  // namespace
}  // namespace ropeway
