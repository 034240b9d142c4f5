// Vectors of 256 bits on AVX2 + FMA + F16C: eight 32-bit lanes. The same names as vec/scalar.h, with the same bits in
// every result.
//
// Included by isa_avx2.cpp alone, inside nothing; knows no kernels. Integer vectors share one type: the suffix of a
// function names the lanes it works on.
#pragma once
#include <immintrin.h>
#include <string.h>

#include <cstdint>

namespace ropeway {
namespace {

// Rows of a gemm tile: 2 * 6 sums, two weight vectors, one broadcast and one product fill 16 registers.
constexpr int kPairTileRows = 6;
#define ROPEWAY_UNROLL _Pragma("GCC unroll 16")

using F32x8 = __m256;
using Bits256 = __m256i;

inline F32x8 zero_f32() { return _mm256_setzero_ps(); }
inline F32x8 broadcast_f32(const float* p) { return _mm256_broadcast_ss(p); }
inline F32x8 set_f32(float x) { return _mm256_set1_ps(x); }
inline F32x8 load_f32(const float* p) { return _mm256_loadu_ps(p); }
inline void store_f32(float* p, F32x8 v) { _mm256_storeu_ps(p, v); }
inline F32x8 add(F32x8 a, F32x8 b) { return _mm256_add_ps(a, b); }
inline F32x8 mul(F32x8 a, F32x8 b) { return _mm256_mul_ps(a, b); }
// a * b + c, rounded once.
inline F32x8 fma(F32x8 a, F32x8 b, F32x8 c) { return _mm256_fmadd_ps(a, b, c); }

inline F32x8 load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F32x8 load_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline Bits256 load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_bits(void* p, Bits256 v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
// The four bytes at p in every 32-bit lane.
inline Bits256 broadcast_32(const void* p) {
  int32_t word;
  memcpy(&word, p, 4);
  return _mm256_set1_epi32(word);
}
inline Bits256 low_nibbles(Bits256 v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Bits256 high_nibbles(Bits256 v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
// Sixteen signed bytes at p as int16.
inline Bits256 load_i8_as_i16(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// int16 lanes: u[2i] * s[2i] + u[2i + 1] * s[2i + 1], u unsigned bytes, s signed; the caller keeps it within int16.
inline Bits256 dot_u8_i8(Bits256 u, Bits256 s) { return _mm256_maddubs_epi16(u, s); }
// s += p. Compilers may reassociate integer sums, which would keep a tile's products waiting in (spilled) registers:
// with the sums pinned here the inner loop of a gemm tile holds 16 registers and runs about 1.7 times as fast.
inline void accumulate_i16(Bits256& s, Bits256 p) {
  s = _mm256_add_epi16(s, p);
  asm("" : "+x"(s));
}
inline void accumulate_i32(Bits256& s, Bits256 p) {
  s = _mm256_add_epi32(s, p);
  asm("" : "+x"(s));
}
// The compiler no longer knows where p points: it would carry a tile's accumulators in registers from one step to the
// next, and spill them.
inline void forget_target(float*& p) { asm("" : "+r"(p)); }
// int32 lanes: a[2i] * b[2i] + a[2i + 1] * b[2i + 1] over int16.
inline Bits256 dot_i16(Bits256 a, Bits256 b) { return _mm256_madd_epi16(a, b); }
inline Bits256 set_bytes(int8_t x) { return _mm256_set1_epi8(x); }
inline F32x8 bits_as_f32(Bits256 v) { return _mm256_castsi256_ps(v); }
inline F32x8 i32_to_f32(Bits256 v) { return _mm256_cvtepi32_ps(v); }
// Nearest integer, ties to even; the caller keeps |v| below 2^31.
inline Bits256 f32_to_i32(F32x8 v) { return _mm256_cvtps_epi32(v); }
// The bits of |v|: as integers they order like the magnitudes, infinity and then NaN last.
inline Bits256 magnitude_bits(F32x8 v) {
  return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
}
inline Bits256 max_i32(Bits256 a, Bits256 b) { return _mm256_max_epi32(a, b); }
// Lane i: the largest lane of v[i].
inline Bits256 max_of_each(const Bits256 (&v)[8]) {
  const auto max_of_pairs = [](__m256i a, __m256i b) {  // lanes in turn: of a, of b
    return _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  };
  const auto max_of_fours = [](__m256i a, __m256i b) {
    return _mm256_max_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  };
  const __m256i a = max_of_fours(max_of_pairs(v[0], v[1]), max_of_pairs(v[2], v[3]));
  const __m256i b = max_of_fours(max_of_pairs(v[4], v[5]), max_of_pairs(v[6], v[7]));
  return _mm256_max_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}
// Lanes 0-3: the sums over the lanes of v[0] .. v[3].
inline Bits256 sum_of_each(const Bits256 (&v)[4]) {
  const __m256i fours = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  return _mm256_add_epi32(fours, _mm256_permute2x128_si256(fours, fours, 0x11));
}
inline int32_t reduce_max_i32(Bits256 v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}
// The low bytes of the 16 lanes of a, b and of the 16 lanes of c, d, two of each in turn; values fit in a signed byte.
inline Bits256 i32_as_i8_pairs(Bits256 a, Bits256 b, Bits256 c, Bits256 d) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, c), _mm256_packs_epi32(b, d));
  return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, order), 0xd8);
}
// The low half of each lane of v in order, to out; values fit in int16.
inline void store_i32_as_i16(int16_t* out, Bits256 v) {
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), halves);
}
// The low half of each of the 16 lanes of a, b in order, to out; values fit in int16.
inline void store_i32_as_i16(int16_t* out, Bits256 a, Bits256 b) {
  store_bits(out, _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8));
}
// GCC 12 deletes a loop that does nothing but prefetch.
inline void prefetch(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p))); }

inline F32x8 sub(F32x8 a, F32x8 b) { return _mm256_sub_ps(a, b); }
inline F32x8 div(F32x8 a, F32x8 b) { return _mm256_div_ps(a, b); }
// a > b ? a : b, so b where either is NaN; min_f32 likewise.
inline F32x8 max_f32(F32x8 a, F32x8 b) { return _mm256_max_ps(a, b); }
inline F32x8 min_f32(F32x8 a, F32x8 b) { return _mm256_min_ps(a, b); }
inline F32x8 ceil_f32(F32x8 v) { return _mm256_ceil_ps(v); }
// The four floats at p, each twice.
inline F32x8 load_each_twice(const float* p) {
  return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}
inline F32x8 swap_pairs(F32x8 v) { return _mm256_permute_ps(v, 0xb1); }
// a - b in even lanes, a + b in odd ones.
inline F32x8 sub_add(F32x8 a, F32x8 b) { return _mm256_addsub_ps(a, b); }
// The lowest 9 bits of each lane as sign and exponent of a float.
inline F32x8 exponent_of_low_bits(F32x8 v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 23));
}
// Lanes 0..n-1 of v, the others of rest.
inline F32x8 first_lanes(F32x8 v, int n, F32x8 rest) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(rest, v, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), index)));
}
inline float first_lane(F32x8 v) { return _mm256_cvtss_f32(v); }
// Halves, quarters, eighths: ((0+4) + (2+6)) + ((1+5) + (3+7)).
inline float reduce_add_f32(F32x8 v) {
  __m128 m = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_add_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_add_ss(m, _mm_shuffle_ps(m, m, 1)));
}
// In the same order, by the rule of max_f32.
inline float reduce_max_f32(F32x8 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
// Rounded to nearest even; beyond the range of f16: its largest value. NaN stays NaN.
inline void store_f16(uint16_t* p, F32x8 v) {
  v = _mm256_min_ps(_mm256_set1_ps(65504.0f), _mm256_max_ps(_mm256_set1_ps(-65504.0f), v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace ropeway
