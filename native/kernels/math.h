// Functions of vectors that several kernels share. Written over vec/*.h.
#pragma once

namespace ropeway {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// x in every lane of a vector of 8, or of a tile.
template <class Vector>
Vector set_lanes(float x);
template <>
inline F32x8 set_lanes<F32x8>(float x) {
  return set_f32(x);
}
template <>
inline TileF32 set_lanes<TileF32>(float x) {
  return set_tile(x);
}

// 2^x for -126 <= x <= 127 or NaN. Adding 1.5 * 2^23 + 127 rounds x to a whole number and leaves the exponent of its
// power of two in the lowest bits.
template <class Vector>
inline Vector exp2_f32_within(Vector x) {
  const auto set = set_lanes<Vector>;
  const Vector shift = set(12582912.0f + 127.0f), shifted = add(x, shift), f = sub(x, sub(shifted, shift));
  Vector p = set(0.0013264727f);
  p = fma(p, f, set(0.009671513f));
  p = fma(p, f, set(0.055507336f));
  p = fma(p, f, set(0.24022242f));
  p = fma(p, f, set(0.693147f));
  p = fma(p, f, set(1.0f));
  return mul(p, exponent_of_low_bits(shifted));
}

// 2^x within 2e-7 relative; 0 < x < 2^-126 results are 2^-126, x above 127 gives 2^127; NaN stays NaN; 2^0 is
// exactly 1. Range reduction to [-1/2, 1/2], then a polynomial fitted for least relative error with p(0) = 1.
template <class Vector>
inline Vector exp2_f32(Vector x) {
  const auto set = set_lanes<Vector>;
  return exp2_f32_within(min_f32(set(127.0f), max_f32(set(-126.0f), x)));
}

// exp2_f32 of x <= 0 or NaN: the same bits without the bound from above.
template <class Vector>
inline Vector exp2_f32_below(Vector x) {
  return exp2_f32_within(max_f32(set_lanes<Vector>(-126.0f), x));
}

// The first n (1..8) floats at p, zeros after.
inline F32x8 load_first(const float* p, int n) {
  float lanes[8] = {};
  memcpy(lanes, p, n * sizeof(float));
  return load_f32(lanes);
}
inline void store_first(float* p, F32x8 v, int n) {
  float lanes[8];
  store_f32(lanes, v);
  memcpy(p, lanes, n * sizeof(float));
}

// out[i] = f(i) for vectors of 8 from i = 0, the last one partial; load and store do the right width.
template <class Compute>
inline void for_vectors(int n, float* out, Compute&& compute) {
  int i = 0;
  for (; i + 8 <= n; i += 8) store_f32(out + i, compute([i](const float* p) { return load_f32(p + i); }));
  if (i < n) store_first(out + i, compute([i, n](const float* p) { return load_first(p + i, n - i); }), n - i);
}

}  // namespace
}  // namespace ropeway
