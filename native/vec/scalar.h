// The vectors of vec/avx2.h written as plain loops: every lane has the same bits, on any machine.
//
// Included by isa_scalar.cpp alone; knows no kernels.
#pragma once
#include <math.h>
#include <string.h>

#include <cstdint>

namespace ropeway {
namespace {

constexpr int kPairTileRows = 1;  // rows of a gemm tile: there are no vector registers to fill
#define ROPEWAY_UNROLL

struct F32x8 {
  float lane[8];
};
struct Bits256 {
  uint8_t byte[32];
};

// Views of the 256 bits as lanes of another width.
struct Int16Lanes {
  int16_t lane[16];
};
struct Int32Lanes {
  int32_t lane[8];
};
inline Int16Lanes as_i16(Bits256 v) {
  Int16Lanes r;
  memcpy(&r, &v, 32);
  return r;
}
inline Int32Lanes as_i32(Bits256 v) {
  Int32Lanes r;
  memcpy(&r, &v, 32);
  return r;
}
template <class Lanes>
inline Bits256 as_bits(const Lanes& v) {
  Bits256 r;
  memcpy(&r, &v, 32);
  return r;
}

inline F32x8 set_f32(float x) { return {{x, x, x, x, x, x, x, x}}; }
inline F32x8 zero_f32() { return set_f32(0.0f); }
inline F32x8 broadcast_f32(const float* p) { return set_f32(*p); }
inline F32x8 load_f32(const float* p) {
  F32x8 r;
  memcpy(&r, p, 32);
  return r;
}
inline void store_f32(float* p, F32x8 v) { memcpy(p, &v, 32); }
inline F32x8 add(F32x8 a, F32x8 b) {
  for (int i = 0; i < 8; i++) a.lane[i] += b.lane[i];
  return a;
}
inline F32x8 mul(F32x8 a, F32x8 b) {
  for (int i = 0; i < 8; i++) a.lane[i] *= b.lane[i];
  return a;
}
inline F32x8 fma(F32x8 a, F32x8 b, F32x8 c) {
  for (int i = 0; i < 8; i++) c.lane[i] = fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}

inline float f32_from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float f32_from_f16(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return f32_from_bits(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  if (exponent) return f32_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  float magnitude = float(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}
inline F32x8 load_f16(const uint16_t* p) {
  F32x8 r;
  for (int i = 0; i < 8; i++) {
    uint16_t h;
    memcpy(&h, p + i, 2);
    r.lane[i] = f32_from_f16(h);
  }
  return r;
}
inline F32x8 load_bf16(const uint16_t* p) {
  F32x8 r;
  for (int i = 0; i < 8; i++) {
    uint16_t h;
    memcpy(&h, p + i, 2);
    r.lane[i] = f32_from_bits(uint32_t(h) << 16);
  }
  return r;
}

inline Bits256 load_bits(const void* p) {
  Bits256 r;
  memcpy(&r, p, 32);
  return r;
}
inline void store_bits(void* p, Bits256 v) { memcpy(p, &v, 32); }
inline Bits256 broadcast_32(const void* p) {
  Bits256 r;
  for (int i = 0; i < 8; i++) memcpy(r.byte + 4 * i, p, 4);
  return r;
}
inline Bits256 low_nibbles(Bits256 v) {
  for (int i = 0; i < 32; i++) v.byte[i] &= 15;
  return v;
}
inline Bits256 high_nibbles(Bits256 v) {
  for (int i = 0; i < 32; i++) v.byte[i] >>= 4;
  return v;
}
inline Bits256 load_i8_as_i16(const int8_t* p) {
  Int16Lanes r;
  for (int i = 0; i < 16; i++) r.lane[i] = p[i];
  return as_bits(r);
}
inline Bits256 dot_u8_i8(Bits256 u, Bits256 s) {
  Int16Lanes r;
  for (int i = 0; i < 16; i++)
    r.lane[i] = int16_t(u.byte[2 * i] * int8_t(s.byte[2 * i]) + u.byte[2 * i + 1] * int8_t(s.byte[2 * i + 1]));
  return as_bits(r);
}
inline Bits256 add_i16(Bits256 a, Bits256 b) {
  Int16Lanes x = as_i16(a), y = as_i16(b);
  for (int i = 0; i < 16; i++) x.lane[i] = int16_t(x.lane[i] + y.lane[i]);
  return as_bits(x);
}
inline Bits256 dot_i16(Bits256 a, Bits256 b) {
  Int16Lanes x = as_i16(a), y = as_i16(b);
  Int32Lanes r;
  for (int i = 0; i < 8; i++)
    r.lane[i] = int32_t(x.lane[2 * i]) * y.lane[2 * i] + int32_t(x.lane[2 * i + 1]) * y.lane[2 * i + 1];
  return as_bits(r);
}
inline Bits256 add_i32(Bits256 a, Bits256 b) {
  Int32Lanes x = as_i32(a), y = as_i32(b);
  for (int i = 0; i < 8; i++) x.lane[i] += y.lane[i];
  return as_bits(x);
}
inline void accumulate_i16(Bits256& s, Bits256 p) { s = add_i16(s, p); }
inline void accumulate_i32(Bits256& s, Bits256 p) { s = add_i32(s, p); }
inline Bits256 set_bytes(int8_t x) {
  Bits256 r;
  memset(r.byte, uint8_t(x), 32);
  return r;
}
inline F32x8 bits_as_f32(Bits256 v) {
  F32x8 r;
  memcpy(&r, &v, 32);
  return r;
}
inline F32x8 i32_to_f32(Bits256 v) {
  Int32Lanes x = as_i32(v);
  F32x8 r;
  for (int i = 0; i < 8; i++) r.lane[i] = float(x.lane[i]);
  return r;
}
inline Bits256 f32_to_i32(F32x8 v) {
  Int32Lanes r;
  for (int i = 0; i < 8; i++) r.lane[i] = int32_t(nearbyintf(v.lane[i]));
  return as_bits(r);
}
inline Bits256 magnitude_bits(F32x8 v) {
  Int32Lanes r;
  memcpy(&r, &v, 32);
  for (int i = 0; i < 8; i++) r.lane[i] &= 0x7fffffff;
  return as_bits(r);
}
inline Bits256 max_i32(Bits256 a, Bits256 b) {
  Int32Lanes x = as_i32(a), y = as_i32(b);
  for (int i = 0; i < 8; i++) x.lane[i] = x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i];
  return as_bits(x);
}
inline int32_t reduce_max_i32(Bits256 v) {
  Int32Lanes x = as_i32(v);
  int32_t m = x.lane[0];
  for (int i = 1; i < 8; i++) m = m > x.lane[i] ? m : x.lane[i];
  return m;
}
inline Bits256 max_of_each(const Bits256 (&v)[8]) {
  Int32Lanes r;
  for (int i = 0; i < 8; i++) r.lane[i] = reduce_max_i32(v[i]);
  return as_bits(r);
}
inline Bits256 sum_of_each(const Bits256 (&v)[4]) {
  Int32Lanes r = {};
  for (int i = 0; i < 4; i++)
    for (const int32_t lane : as_i32(v[i]).lane) r.lane[i] += lane;
  return as_bits(r);
}
inline Bits256 i32_as_i8_pairs(Bits256 a, Bits256 b, Bits256 c, Bits256 d) {
  const Int32Lanes v[2][2] = {{as_i32(a), as_i32(b)}, {as_i32(c), as_i32(d)}};
  Bits256 r;
  for (int i = 0; i < 32; i++) r.byte[i] = uint8_t(v[i / 2 % 2][i / 16].lane[i % 16 / 4 * 2 + i % 2]);
  return r;
}
inline void store_i32_as_i16(int16_t* out, Bits256 v) {
  for (int i = 0; i < 8; i++) out[i] = int16_t(as_i32(v).lane[i]);
}
inline void store_i32_as_i16(int16_t* out, Bits256 a, Bits256 b) {
  const Int32Lanes v[2] = {as_i32(a), as_i32(b)};
  for (int i = 0; i < 16; i++) out[i] = int16_t(v[i / 8].lane[i % 8]);
}
inline void prefetch(const void*) {}
inline void forget_target(float*) {}

inline F32x8 sub(F32x8 a, F32x8 b) {
  for (int i = 0; i < 8; i++) a.lane[i] -= b.lane[i];
  return a;
}
inline F32x8 div(F32x8 a, F32x8 b) {
  for (int i = 0; i < 8; i++) a.lane[i] /= b.lane[i];
  return a;
}
inline float greater(float a, float b) { return a > b ? a : b; }
inline F32x8 max_f32(F32x8 a, F32x8 b) {
  for (int i = 0; i < 8; i++) a.lane[i] = greater(a.lane[i], b.lane[i]);
  return a;
}
inline F32x8 min_f32(F32x8 a, F32x8 b) {
  for (int i = 0; i < 8; i++) a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
inline F32x8 ceil_f32(F32x8 v) {
  for (int i = 0; i < 8; i++) v.lane[i] = ceilf(v.lane[i]);
  return v;
}
inline F32x8 load_each_twice(const float* p) {
  F32x8 r;
  for (int i = 0; i < 8; i++) r.lane[i] = p[i / 2];
  return r;
}
inline F32x8 swap_pairs(F32x8 v) {
  F32x8 r;
  for (int i = 0; i < 8; i++) r.lane[i] = v.lane[i ^ 1];
  return r;
}
inline F32x8 sub_add(F32x8 a, F32x8 b) {
  for (int i = 0; i < 8; i++) a.lane[i] = i % 2 ? a.lane[i] + b.lane[i] : a.lane[i] - b.lane[i];
  return a;
}
inline F32x8 exponent_of_low_bits(F32x8 v) {
  uint32_t bits[8];
  memcpy(bits, &v, 32);
  for (int i = 0; i < 8; i++) v.lane[i] = f32_from_bits(bits[i] << 23);
  return v;
}
inline F32x8 first_lanes(F32x8 v, int n, F32x8 rest) {
  for (int i = n; i < 8; i++) v.lane[i] = rest.lane[i];
  return v;
}
inline float first_lane(F32x8 v) { return v.lane[0]; }
inline float reduce_add_f32(F32x8 v) {
  for (int half = 4; half; half /= 2)
    for (int i = 0; i < half; i++) v.lane[i] += v.lane[i + half];
  return v.lane[0];
}
inline float reduce_max_f32(F32x8 v) {
  for (int half = 4; half; half /= 2)
    for (int i = 0; i < half; i++) v.lane[i] = greater(v.lane[i], v.lane[i + half]);
  return v.lane[0];
}
// Nearest even, as bits: the exponent moves from bias 127 to 15; below 2^-14 the fixed step is 2^-24.
inline uint16_t f16_from_f32(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return uint16_t(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
  if (bits > 0x477fe000u) return uint16_t(sign | 0x7bffu);
  if (bits < 0x38800000u) return uint16_t(sign | uint16_t(nearbyintf(f32_from_bits(bits) * 0x1p24f)));
  return uint16_t(sign | (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13);
}
inline void store_f16(uint16_t* p, F32x8 v) {
  for (int i = 0; i < 8; i++) p[i] = f16_from_f32(v.lane[i]);
}

}  // namespace
}  // namespace ropeway
