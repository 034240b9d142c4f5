// Everything between the products that works on one row at a time. Written over vec/*.h.
//
// Plain loops without reductions are left to the compiler: the bits of each element do not depend on how it is
// vectorised.
#pragma once

namespace ropeway {
namespace {

// out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i] for one row (Zhang & Sennrich 2019).
void rms_norm(const RowsView& x, const float* weight, float eps, const RowsView& out, int row) {
  const int n = x.width;
  const float* in = x.data + row * x.ld;
  F32x8 sums[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};  // vector i goes to sum i % 4
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int s = 0; s < 4; ++s) {
      const F32x8 v = load_f32(in + i + s * kLanes);
      sums[s] = fma(v, v, sums[s]);
    }
  }
  for (int s = 0; i < n; i += kLanes, ++s) {
    const F32x8 v = i + kLanes <= n ? load_f32(in + i) : load_first(in + i, n - i);
    sums[s] = fma(v, v, sums[s]);
  }
  const float mean = reduce_add_f32(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / static_cast<float>(n);
  const F32x8 inverse = set_f32(1.0f / __builtin_sqrtf(mean + eps));
  for_vectors(n, out.data + row * out.ld, [&](auto load) { return mul(mul(load(in), inverse), load(weight)); });
}

void add_rows(const RowsView& a, const RowsView& b, const RowsView& out, int row) {
  const float *x = a.data + row * a.ld, *y = b.data + row * b.ld;
  for_vectors(a.width, out.data + row * out.ld, [&](auto load) { return add(load(x), load(y)); });
}

// x[row] += bias
void add_bias(const RowsView& x, const float* bias, int row) {
  float* in = x.data + row * x.ld;
  for_vectors(x.width, in, [&](auto load) { return add(load(in), load(bias)); });
}

template <class Vector>
inline Vector gated(Vector gate, Vector up) {
  const auto set = set_lanes<Vector>;
  return mul(div(gate, add(set(1.0f), exp2_f32(mul(gate, set(-kLog2E))))), up);
}

// out = gate / (1 + exp(-gate)) * up
void silu_gate(const RowsView& gate, const RowsView& up, const RowsView& out, int row) {
  const float *x = gate.data + row * gate.ld, *y = up.data + row * up.ld;
  float* to = out.data + row * out.ld;
  int i = 0;
  if constexpr (kHasWideTiles)
    for (; i + kTileColumns <= gate.width; i += kTileColumns)
      store_tile(to + i, gated(load_tile(x + i), load_tile(y + i)));
  x += i, y += i;
  for_vectors(gate.width - i, to + i, [&](auto load) { return gated(load(x), load(y)); });
}

// Rotates pairs (v[2i], v[2i + 1]) by the angle whose cosine and sine are at i.
inline void rotate_interleaved(float* v, int half, const float* cosines, const float* sines) {
  int i = 0;
  for (; i + kLanes / 2 <= half; i += kLanes / 2) {
    const F32x8 x = load_f32(v + 2 * i);
    store_f32(v + 2 * i, sub_add(mul(x, load_each_twice(cosines + i)), mul(swap_pairs(x), load_each_twice(sines + i))));
  }
  for (; i < half; ++i) {
    const float a = v[2 * i], b = v[2 * i + 1];
    v[2 * i] = a * cosines[i] - b * sines[i];
    v[2 * i + 1] = b * cosines[i] + a * sines[i];
  }
}

// The same for pairs (v[i], v[i + half]).
inline void rotate_halves(float* v, int half, const float* cosines, const float* sines) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32x8 a = load_f32(v + i), b = load_f32(v + half + i), c = load_f32(cosines + i), s = load_f32(sines + i);
    store_f32(v + i, sub(mul(a, c), mul(b, s)));
    store_f32(v + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = v[i], b = v[half + i];
    v[i] = a * cosines[i] - b * sines[i];
    v[half + i] = b * cosines[i] + a * sines[i];
  }
}

// Rotates the pairs of each head; turns[row]: cos[rotary_dim / 2] then sin[rotary_dim / 2] of the row's position.
void rope(const RowsView& x, const RopeShape& shape, const float* turns, int row) {
  const int half = shape.rotary_dim / 2, num_heads = x.width / shape.head_dim;
  const float *cosines = turns + int64_t{row} * shape.rotary_dim, *sines = cosines + half;
  float* v = x.data + row * x.ld;
  for (int head = 0; head < num_heads; ++head, v += shape.head_dim)
    (shape.is_interleaved ? rotate_interleaved : rotate_halves)(v, half, cosines, sines);
}

// Stores one token's keys and values of every KV head, rounded to f16 (beyond its range: its largest value).
void kv_write(const float* k, const float* v, const KvSlot& slot) {
  const int head_dim = slot.head_dim, padded = (head_dim + 7) / 8 * 8;
  for (int head = 0; head < slot.num_kv_heads; ++head, k += head_dim, v += head_dim) {
    uint16_t* keys = slot.block + head * slot.head_stride + slot.index;
    uint16_t* values = slot.block + head * slot.head_stride + head_dim * slot.block_size + slot.index * padded;
    for (int d = 0; d < head_dim; d += kLanes) {
      const int n = head_dim - d < kLanes ? head_dim - d : kLanes;
      uint16_t narrow[kLanes];
      store_f16(narrow, n == kLanes ? load_f32(k + d) : load_first(k + d, n));
      for (int i = 0; i < n; ++i) keys[(d + i) * slot.block_size] = narrow[i];
      store_f16(values + d, n == kLanes ? load_f32(v + d) : load_first(v + d, n));
    }
  }
}

}  // namespace
}  // namespace ropeway
