// Paged causal attention over the f16 cache. One arithmetic per (row, query head), whatever rows are computed beside
// it: keys in tiles of kKeyTile aligned to absolute positions, an online softmax within a split of kKeySplit positions,
// splits merged in order. Scores are a single chain of fused multiply-adds over head_dim; values one over the keys.
#pragma once

namespace ropeway {
namespace {

constexpr int kKeyTile = 64;
constexpr int kTileVectors = kKeyTile / kLanes;
constexpr int kMaxTogether = 6;      // (row, head) pairs whose accumulators fit the registers
constexpr int kMaxDirectPairs = 16;  // more read a tile widened; 8 run 1.3 times as fast on the f16s
constexpr float kNoKeys = -1e30f;    // a maximum below every score
constexpr int kStateExtra = 2 * kLanes;

// The online softmax of one (row, head) pair: acc[padded head_dim], the sums of weights by lane [8], then from the sums
// on kMaximumAt the maximum and kDecayAt what the last tile multiplied acc by.
constexpr int kMaximumAt = kLanes, kDecayAt = kLanes + 1;

int attention_state_floats(int head_dim) { return (head_dim + 7) / 8 * 8 + kStateExtra; }

// What the products of attention are taken in: vectors of 8 keys or entries, or, where a set has registers for two of
// them, both at once. The bits are the same.
struct Single {
  using Vector = F32x8;
  static constexpr int kVectors = 1;
  static Vector zero() { return zero_f32(); }
  static Vector broadcast(const float* p) { return broadcast_f32(p); }
  static Vector load(const float* p) { return load_f32(p); }
  static Vector load(const uint16_t* p) { return load_f16(p); }
  static void store(float* p, Vector v) { store_f32(p, v); }
  static float reduce_max(Vector v) { return reduce_max_f32(v); }
  static F32x8 add_to(F32x8 sums, Vector v) { return add(sums, v); }
};
struct Double {
  using Vector = TileF32;
  static constexpr int kVectors = 2;
  static Vector zero() { return zero_tile(); }
  static Vector broadcast(const float* p) { return broadcast_tile(p); }
  static Vector load(const float* p) { return load_tile(p); }
  static Vector load(const uint16_t* p) { return load_tile_f16(p); }
  static void store(float* p, Vector v) { store_tile(p, v); }
  static float reduce_max(Vector v) { return reduce_max_f32(max_f32(low_half(v), high_half(v))); }
  // As the two halves one after the other.
  static F32x8 add_to(F32x8 sums, Vector v) { return add(add(sums, low_half(v)), high_half(v)); }
};

template <bool IsDouble>
struct UnitOf {
  using Unit = Double;
};
template <>
struct UnitOf<false> {
  using Unit = Single;
};
using Widest = UnitOf<kHasWideTiles>::Unit;

// Where a tile's keys and values are: k[i][d * ld_k ..] holds entry d of keys 8i..8i+7, v[i][j * ld_v ..] the values of
// key 8i+j. While they are read, what lies in the same way at next_k and next_v is fetched: prefetches spread over the
// arithmetic wait for memory beside it, those of a whole tile at once before it.
template <class T>
struct KeyTile {
  const T* k[kTileVectors];
  const T* v[kTileVectors];
  const T* next_k[kTileVectors];
  const T* next_v[kTileVectors];
  int64_t ld_k, ld_v;
};
constexpr int kLineVectors = 4;  // vectors of 8 f16s in a cache line

template <class T>
constexpr bool is_fetched_ahead = sizeof(T) == sizeof(uint16_t);  // a widened tile is in the caches

template <int N>
struct Count {
  static constexpr int value = N;
};

// Scaled queries: data[pair * ld + d].
struct Queries {
  const float* data;
  int64_t ld;
  Queries from(int pair) const { return {data + pair * ld, ld}; }
};

// acc[r][c] += row(r) * column(c). The side with fewer vectors stays in registers, so that 12 sums, its vectors and one
// of the other side are all there is.
template <int R, int C, class Row, class Column, class Vector>
inline void multiply_add(Row&& row, Column&& column, Vector (&acc)[R][C]) {
  if constexpr (C <= R) {
    Vector columns[C];
    ROPEWAY_UNROLL
    for (int c = 0; c < C; ++c) columns[c] = column(c);
    ROPEWAY_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vector x = row(r);
      ROPEWAY_UNROLL
      for (int c = 0; c < C; ++c) acc[r][c] = fma(x, columns[c], acc[r][c]);
    }
  } else {
    Vector rows[R];
    ROPEWAY_UNROLL
    for (int r = 0; r < R; ++r) rows[r] = row(r);
    ROPEWAY_UNROLL
    for (int c = 0; c < C; ++c) {
      const Vector x = column(c);
      ROPEWAY_UNROLL
      for (int r = 0; r < R; ++r) acc[r][c] = fma(rows[r], x, acc[r][c]);
    }
  }
}

// Scores of R pairs with the keys of C of Unit's vectors from vector `first` of 8 keys, to s[r][..].
template <class Unit, int R, int C, class T>
inline void score_vectors(Queries q, int head_dim, const KeyTile<T>& tile, int first, float* s) {
  constexpr int kVectors = Unit::kVectors;
  const T *const *k = tile.k + first, *const *next = tile.next_k + first;
  const int64_t ld_k = tile.ld_k;
  typename Unit::Vector acc[R][C];
  ROPEWAY_UNROLL
  for (int r = 0; r < R; ++r) ROPEWAY_UNROLL
  for (int c = 0; c < C; ++c) acc[r][c] = Unit::zero();
  const float* x[R];
  ROPEWAY_UNROLL
  for (int r = 0; r < R; ++r) x[r] = q.data + r * q.ld;
  for (int64_t d = 0; d < head_dim; ++d) {
    // A line holds two entries or more of 16 keys in blocks of 16: vectors 0 and 2 take turns.
    if constexpr (is_fetched_ahead<T>)
      for (int c = d % 2 * 2; c < C * kVectors; c += kLineVectors) prefetch(next[c] + d * ld_k);
    multiply_add<R, C>([&](int r) { return Unit::broadcast(x[r] + d); },
                       [&](int c) { return Unit::load(k[c * kVectors] + d * ld_k); }, acc);
  }
  ROPEWAY_UNROLL
  for (int r = 0; r < R; ++r) ROPEWAY_UNROLL
  for (int c = 0; c < C; ++c) Unit::store(s + r * kKeyTile + c * kVectors * kLanes, acc[r][c]);
}

// Adds weighted values to C of Unit's vectors of columns from `col` of R states, after decaying what is there.
template <class Unit, int R, int C, class T>
inline void mix_vectors(const float* p, int num_keys, const KeyTile<T>& tile, int col, float* states, int64_t stride,
                        int at_decay) {
  constexpr int kWidth = Unit::kVectors * kLanes;
  const int64_t ld_v = tile.ld_v;
  typename Unit::Vector acc[R][C];
  ROPEWAY_UNROLL
  for (int r = 0; r < R; ++r) {
    const auto decay = Unit::broadcast(states + r * stride + at_decay);
    ROPEWAY_UNROLL
    for (int c = 0; c < C; ++c) acc[r][c] = mul(Unit::load(states + r * stride + col + c * kWidth), decay);
  }
  const auto take = [&](const T* row, int key) {
    multiply_add<R, C>([&](int r) { return Unit::broadcast(p + r * kKeyTile + key); },
                       [&](int c) { return Unit::load(row + c * kWidth); }, acc);
  };
  int key = 0;
  for (; key + kLanes <= num_keys; key += kLanes) {
    const T *row = tile.v[key / kLanes] + col, *next = tile.next_v[key / kLanes] + col;
    ROPEWAY_UNROLL
    for (int j = 0; j < kLanes; ++j, row += ld_v, next += ld_v) {
      if constexpr (is_fetched_ahead<T>)
        for (int c = 0; c < C * Unit::kVectors; c += kLineVectors) prefetch(next + c * kLanes);
      take(row, key + j);
    }
  }
  if (key < num_keys)
    for (const T* row = tile.v[key / kLanes] + col; key < num_keys; ++key, row += ld_v) take(row, key);
  ROPEWAY_UNROLL
  for (int r = 0; r < R; ++r) ROPEWAY_UNROLL
  for (int c = 0; c < C; ++c) Unit::store(states + r * stride + col + c * kWidth, acc[r][c]);
}

// Adds weighted values of keys [first_key, num_keys) to one state that holds the sum over the keys before.
template <class T>
inline void mix_rest(const float* p, int first_key, int num_keys, const KeyTile<T>& tile, int width, float* state) {
  for (int key = first_key; key < num_keys; ++key) {
    const F32x8 weight = broadcast_f32(p + key);
    const T* row = tile.v[key / kLanes] + key % kLanes * tile.ld_v;
    for (int i = 0; i < width * kLanes; i += kLanes)
      store_f32(state + i, fma(weight, Single::load(row + i), load_f32(state + i)));
  }
}

// s[R][64] holds the scores (in powers of two) of a tile's keys, of which pair r sees the first num_keys[r], and
// receives their weights under the new maxima; the sums, maxima and decays of the R states follow. One step after
// another for all pairs, so that the chains of one pair wait beside those of the others.
template <class Unit, int R>
inline void soften(float* s, const int* num_keys, float* sums, int64_t stride) {
  using Vector = typename Unit::Vector;
  constexpr int kWidth = Unit::kVectors * kLanes, kVectors = kKeyTile / kWidth;
  const auto set = set_lanes<Vector>;
  float fall[kLanes] = {};  // old maximum - new maximum
  for (int r = 0; r < R; ++r) {
    float* row = s + r * kKeyTile;
    Vector top = Unit::load(row);
    if (num_keys[r] == kKeyTile) {
      ROPEWAY_UNROLL
      for (int c = 1; c < kVectors; ++c) top = max_f32(top, Unit::load(row + c * kWidth));
    } else {
      const int num_vectors = num_keys[r] / kWidth, rest = num_keys[r] % kWidth;
      if (num_vectors == 0) top = set(kNoKeys);
      for (int c = 1; c < num_vectors; ++c) top = max_f32(top, Unit::load(row + c * kWidth));
      if (rest) top = max_f32(top, first_lanes(Unit::load(row + num_vectors * kWidth), rest, set(kNoKeys)));
    }
    const float tile_maximum = Unit::reduce_max(top), maximum = sums[r * stride + kMaximumAt];
    const float new_maximum = tile_maximum > maximum ? tile_maximum : maximum;
    fall[r] = maximum - new_maximum;
    sums[r * stride + kMaximumAt] = new_maximum;
  }
  float decay[kLanes];
  store_f32(decay, exp2_f32_below(load_f32(fall)));
  for (int r = 0; r < R; ++r) {
    float* row = s + r * kKeyTile;
    const Vector shift = set(sums[r * stride + kMaximumAt]);
    F32x8 total = mul(load_f32(sums + r * stride), set_f32(decay[r]));
    const auto weigh = [&](int c) { return exp2_f32_below(sub(Unit::load(row + c * kWidth), shift)); };
    const auto take = [&](int c, Vector weight) {
      Unit::store(row + c * kWidth, weight);
      total = Unit::add_to(total, weight);
    };
    if (num_keys[r] == kKeyTile) {
      ROPEWAY_UNROLL
      for (int c = 0; c < kVectors; ++c) take(c, weigh(c));
    } else {
      const int num_vectors = num_keys[r] / kWidth, rest = num_keys[r] % kWidth;
      for (int c = 0; c < num_vectors; ++c) take(c, weigh(c));
      if (rest) take(num_vectors, first_lanes(weigh(num_vectors), rest, Unit::zero()));
    }
    float* out = sums + r * stride;
    store_f32(out, total);
    out[kDecayAt] = decay[r];
  }
}

// Columns of registers for R rows: enough independent chains to fill two multiply-add pipes, few enough for the
// registers.
template <class Unit>
constexpr int chain_columns(int rows) {
  if (kTileRows == 1) return 1;
  if (Unit::kVectors == 2) return 4;  // 6 rows in 4 columns are 24 of 32 registers
  return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
}

// step(Count<C>, first vector) over num_vectors vectors, in C columns as long as there are so many, then in fewer.
template <int C, class Step>
inline void for_columns(int num_vectors, int first, Step&& step) {
  for (; first + C <= num_vectors; first += C) step(Count<C>{}, first);
  if constexpr (C > 1) for_columns<C / 2>(num_vectors, first, step);
}

// step(Count<R>, first pair) over num_pairs pairs, kMaxTogether at a time.
template <class Step>
inline void for_pairs(int num_pairs, Step&& step) {
  int first = 0;
  for (; first + kMaxTogether <= num_pairs; first += kMaxTogether) step(Count<kMaxTogether>{}, first);
  switch (num_pairs - first) {
    case 1:
      return step(Count<1>{}, first);
    case 2:
      return step(Count<2>{}, first);
    case 3:
      return step(Count<3>{}, first);
    case 4:
      return step(Count<4>{}, first);
    case 5:
      return step(Count<5>{}, first);
    default:
      return;
  }
}

// How many keys of a tile each pair sees: pairs of the first row `first`, those of each later row one more, up to all.
struct Visible {
  int first, group;
  int operator()(int pair) const {
    const int num_keys = first + pair / group;
    return num_keys < kKeyTile ? num_keys : kKeyTile;
  }
};

// Takes a tile's keys into the states of pairs that see at least one of them. No pair's state touches a key that it
// does not see: those that all of a few pairs see are taken together, the rest pair by pair. Scores of all pairs come
// before values of any, so that each half of a widened tile has the first-level cache to itself (1.2 times as fast with
// 96 pairs). s: [num_pairs][64].
template <class Unit, class T>
void attend_pairs(Queries q, int num_pairs, int head_dim, const KeyTile<T>& tile, Visible visible, float* states,
                  float* s) {
  const int stride = attention_state_floats(head_dim), width = (head_dim + kLanes - 1) / kLanes;
  const int at_sums = width * kLanes;
  for_pairs(num_pairs, [&](auto rows, int first) {
    constexpr int R = decltype(rows)::value;
    int num_keys[R];
    for (int r = 0; r < R; ++r) num_keys[r] = visible(first + r);
    // Scores of keys that nobody sees may be computed: a vector's last ones.
    constexpr int kKeys = Unit::kVectors * kLanes;
    for_columns<chain_columns<Unit>(R)>((num_keys[R - 1] + kKeys - 1) / kKeys, 0, [&](auto columns, int c) {
      score_vectors<Unit, R, decltype(columns)::value>(q.from(first), head_dim, tile, c * Unit::kVectors,
                                                       s + first * kKeyTile + c * kKeys);
    });
    soften<Unit, R>(s + first * kKeyTile, num_keys, states + first * stride + at_sums, stride);
  });
  for_pairs(num_pairs, [&](auto rows, int first) {
    constexpr int R = decltype(rows)::value;
    const int num_keys = visible(first);
    const auto mix = [&](auto unit, auto columns, int col) {
      mix_vectors<decltype(unit), R, decltype(columns)::value>(s + first * kKeyTile, num_keys, tile, col,
                                                               states + first * stride, stride, at_sums + kDecayAt);
    };
    for_columns<chain_columns<Unit>(R)>(
        width / Unit::kVectors, 0, [&](auto columns, int c) { mix(Unit{}, columns, c * Unit::kVectors * kLanes); });
    if (width % Unit::kVectors) mix(Single{}, Count<1>{}, (width - 1) * kLanes);
    if (visible(first + R - 1) == num_keys) return;
    for (int pair = first + 1; pair < first + R; ++pair)
      mix_rest(s + pair * kKeyTile, num_keys, visible(pair), tile, width, states + pair * stride);
  });
}

// Calls found(vector, keys, values) for the vectors of 8 keys from tile_start that begin before end.
template <class Found>
inline void find_vectors(const AttentionTask& task, const KvBlocks& blocks, int tile_start, int end, Found&& found) {
  const int padded = (task.head_dim + 7) / 8 * 8, num_vectors = (end - tile_start + kLanes - 1) / kLanes;
  const int32_t* id = blocks.block_ids + tile_start / task.block_size;
  int slot = tile_start % task.block_size;
  for (int c = 0; c < kTileVectors && c < num_vectors; ++c) {
    const uint16_t* block = blocks.cache + *id * task.block_stride;
    found(c, block + slot, block + task.head_dim * task.block_size + slot * padded);
    if ((slot += kLanes) == task.block_size) slot = 0, ++id;
  }
}

// The tile at tile_start, of keys before end, and what to fetch beside it: the same tile of what the thread attends to
// next while that fits the second-level cache, or the tile after this one.
inline KeyTile<uint16_t> find_tile(const AttentionTask& task, int tile_start, int end) {
  KeyTile<uint16_t> tile;
  tile.ld_k = task.block_size;
  tile.ld_v = (task.head_dim + 7) / 8 * 8;
  find_vectors(task, task.blocks, tile_start, end, [&](int c, const uint16_t* k, const uint16_t* v) {
    tile.k[c] = tile.next_k[c] = k;
    tile.v[c] = tile.next_v[c] = v;
  });
  const auto fetch = [&](int c, const uint16_t* k, const uint16_t* v) {
    tile.next_k[c] = k;
    tile.next_v[c] = v;
  };
  if (task.num_next_keys > 0)
    find_vectors(task, task.next, tile_start, task.num_next_keys, fetch);
  else
    find_vectors(task, task.blocks, tile_start + kKeyTile, task.start + task.num_rows, fetch);
  return tile;
}

// The tile as float32: keys in panels of 16 [4][head_dim][16], so that two vectors of all entries lie side by side,
// then values [64][padded head_dim].
inline KeyTile<float> widen_tile(const KeyTile<uint16_t>& from, int head_dim, int num_vectors, float* out) {
  const int padded = (head_dim + 7) / 8 * 8;
  constexpr int kPanel = 2 * kLanes;
  KeyTile<float> tile{{}, {}, {}, {}, kPanel, padded};
  float* values = out + head_dim * kKeyTile;
  for (int c = 0; c < num_vectors; ++c) {
    tile.k[c] = out + c / 2 * head_dim * kPanel + c % 2 * kLanes;
    tile.v[c] = values + c * kLanes * padded;
  }
  for (int c = 0; c < num_vectors; c += 2) {
    float* panel = out + c / 2 * head_dim * kPanel;
    if (c + 1 < num_vectors && from.k[c + 1] == from.k[c] + kLanes) {
      for (int d = 0; d < head_dim; ++d) store_tile(panel + d * kPanel, load_tile_f16(from.k[c] + d * from.ld_k));
      continue;
    }
    for (int i = 0; i < 2 && c + i < num_vectors; ++i)
      for (int d = 0; d < head_dim; ++d)
        store_f32(panel + d * kPanel + i * kLanes, load_f16(from.k[c + i] + d * from.ld_k));
  }
  for (int c = 0; c < num_vectors; ++c)
    for (int i = 0; i < kLanes * padded; i += kTileColumns)
      store_tile(values + c * kLanes * padded + i, load_tile_f16(from.v[c] + i));
  return tile;
}

inline void clear_states(float* states, int num_pairs, int head_dim) {
  const int stride = attention_state_floats(head_dim);
  for (int pair = 0; pair < num_pairs; ++pair, states += stride) {
    for (int i = 0; i < stride; i += kLanes) store_f32(states + i, zero_f32());
    states[stride - kLanes] = kNoKeys;
  }
}

// states: of every pair, over the keys of one split. wide: room for a widened tile; s: [num_pairs][64].
void attend_split(const AttentionTask& task, int split, Queries q, float* states, float* wide, float* s) {
  const int stride = attention_state_floats(task.head_dim);
  clear_states(states, task.num_rows * task.group, task.head_dim);
  const int last_position = task.start + task.num_rows - 1;
  const int end = (split + 1) * kKeySplit < last_position + 1 ? (split + 1) * kKeySplit : last_position + 1;
  for (int tile_start = split * kKeySplit; tile_start < end; tile_start += kKeyTile) {
    const int num_keys = end - tile_start < kKeyTile ? end - tile_start : kKeyTile;
    const int num_vectors = (num_keys + kLanes - 1) / kLanes;
    const int first_row = tile_start > task.start ? tile_start - task.start : 0;
    const int first_pair = first_row * task.group, num_pairs = task.num_rows * task.group - first_pair;
    const Visible visible{task.start + first_row - tile_start + 1, task.group};
    const KeyTile<uint16_t> tile = find_tile(task, tile_start, end);
    const auto attend = [&](auto unit, const auto& keys) {
      attend_pairs<decltype(unit)>(q.from(first_pair), num_pairs, task.head_dim, keys, visible,
                                   states + first_pair * stride, s + first_pair * kKeyTile);
    };
    if (num_pairs > kMaxDirectPairs) {
      attend(Widest{}, widen_tile(tile, task.head_dim, num_vectors, wide));
    } else if (task.block_size % (Widest::kVectors * kLanes)) {  // neighbouring vectors of keys lie in other blocks
      attend(Single{}, tile);
    } else {
      attend(Widest{}, tile);
    }
  }
}

// total = the softmax state over both key sets, total's first.
void merge_state(float* total, const float* next, int head_dim) {
  const int stride = attention_state_floats(head_dim), at = stride - kLanes;
  const float maximum = next[at] > total[at] ? next[at] : total[at];
  const F32x8 a = exp2_f32(set_f32(total[at] - maximum)), b = exp2_f32(set_f32(next[at] - maximum));
  for (int i = 0; i < at; i += kLanes) store_f32(total + i, fma(load_f32(next + i), b, mul(load_f32(total + i), a)));
  total[at] = maximum;
}

void write_pair(const float* state, int head_dim, float* out) {
  const int padded = (head_dim + 7) / 8 * 8;
  const F32x8 inverse = set_f32(1.0f / reduce_add_f32(load_f32(state + padded)));
  for_vectors(head_dim, out, [&](auto load) { return mul(load(state), inverse); });
}

int64_t attention_scratch_floats(int num_rows, int group, int head_dim) {
  const int64_t num_pairs = int64_t{num_rows} * group, padded = (head_dim + 7) / 8 * 8;
  return num_pairs * kKeyTile + kKeyTile * (head_dim + padded) +
         num_pairs * (head_dim + 8 + 2 * attention_state_floats(head_dim));
}

void attention(const AttentionTask& task, float* partials, float* scratch) {
  const int num_pairs = task.num_rows * task.group, stride = attention_state_floats(task.head_dim),
            head_dim = task.head_dim, padded = (head_dim + 7) / 8 * 8;
  float* s = scratch;
  float* wide = s + num_pairs * kKeyTile;
  float* total = wide + kKeyTile * (head_dim + (head_dim + 7) / 8 * 8);
  float* next = total + num_pairs * stride;
  float* turned = next + num_pairs * stride;
  for (int pair = 0; pair < num_pairs; ++pair) {
    const float* from = task.q + pair / task.group * task.ld_q + pair % task.group * head_dim;
    const F32x8 scale = set_f32(task.scale * kLog2E);
    for_vectors(head_dim, turned + pair * padded, [&](auto load) { return mul(load(from), scale); });
  }
  const Queries q{turned, padded};
  if (partials) {
    for (int split = task.split_begin; split < task.split_end; ++split)
      attend_split(task, split, q, partials + int64_t{split} * num_pairs * stride, wide, s);
    return;
  }
  attend_split(task, 0, q, total, wide, s);
  for (int split = 1; split < task.split_end; ++split) {
    attend_split(task, split, q, next, wide, s);
    const int first_row = split * kKeySplit > task.start ? split * kKeySplit - task.start : 0;
    for (int pair = first_row * task.group; pair < num_pairs; ++pair)
      merge_state(total + pair * stride, next + pair * stride, head_dim);
  }
  for (int pair = 0; pair < num_pairs; ++pair)
    write_pair(total + pair * stride, head_dim,
               task.out + pair / task.group * task.ld_out + pair % task.group * head_dim);
}

void attention_merge(const AttentionTask& task, float* partials) {
  const int num_pairs = task.num_rows * task.group, stride = attention_state_floats(task.head_dim);
  for (int pair = 0; pair < num_pairs; ++pair) {
    float* total = partials + pair * stride;
    for (int split = 1; split < task.split_end; ++split)
      merge_state(total, partials + (int64_t{split} * num_pairs + pair) * stride, task.head_dim);
    write_pair(total, task.head_dim, task.out + pair / task.group * task.ld_out + pair % task.group * task.head_dim);
  }
}

}  // namespace
}  // namespace ropeway
