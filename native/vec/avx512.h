// Tile vectors of 512 bits on AVX-512 F, BW, DQ, VL and VNNI: all 16 columns of a weight tile at once. Vectors of eight
// lanes are those of vec/avx2.h, with twice as many registers. The same names as vec/pair.h and, but for the order of
// codes within a group, the same bits.
//
// Included by isa_avx512.cpp alone, after vec/avx2.h; knows no kernels.
#pragma once

namespace ropeway {
namespace {

constexpr int kMinPanelTiles = 2;  // row tiles for which unpacking pays: nibbles have to be put in order
constexpr int kTileRows = 12;      // rows of a gemm tile: 2 * 12 sums and the weights fill 32 registers

constexpr bool kHasWideTiles = true;
using TileF32 = __m512;
using TileBits = __m512i;

inline TileF32 load_tile(const float* p) { return _mm512_loadu_ps(p); }
inline TileF32 load_tile_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline TileF32 load_tile_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline TileF32 broadcast_tile(const float* p) { return _mm512_set1_ps(*p); }
inline TileF32 zero_tile() { return _mm512_setzero_ps(); }
inline TileF32 set_tile(float x) { return _mm512_set1_ps(x); }
inline void store_tile(float* p, TileF32 v) { _mm512_storeu_ps(p, v); }
inline TileF32 mul(TileF32 a, TileF32 b) { return _mm512_mul_ps(a, b); }
inline TileF32 fma(TileF32 a, TileF32 b, TileF32 c) { return _mm512_fmadd_ps(a, b, c); }
inline TileF32 add(TileF32 a, TileF32 b) { return _mm512_add_ps(a, b); }
inline TileF32 sub(TileF32 a, TileF32 b) { return _mm512_sub_ps(a, b); }
inline TileF32 div(TileF32 a, TileF32 b) { return _mm512_div_ps(a, b); }
inline TileF32 max_f32(TileF32 a, TileF32 b) { return _mm512_max_ps(a, b); }
inline TileF32 min_f32(TileF32 a, TileF32 b) { return _mm512_min_ps(a, b); }
inline TileF32 exponent_of_low_bits(TileF32 v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 23));
}
inline TileF32 first_lanes(TileF32 v, int n, TileF32 rest) {
  return _mm512_mask_mov_ps(rest, static_cast<__mmask16>((1u << n) - 1), v);
}
inline F32x8 low_half(TileF32 v) { return _mm512_castps512_ps256(v); }
inline F32x8 high_half(TileF32 v) { return _mm512_extractf32x8_ps(v, 1); }

inline TileBits load_tile_bits(const void* p) { return _mm512_loadu_si512(p); }
inline void store_tile_bits(void* p, TileBits v) { _mm512_storeu_si512(p, v); }
inline TileBits load_tile_i8_as_i16(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline TileF32 i32_to_f32(TileBits v) { return _mm512_cvtepi32_ps(v); }

// A lane's four bytes hold, low and high nibble: of the first half inputs 0 and 2, 1 and 3, of the second half the
// same. Of codes, two lanes belong to an output: four inputs of the first half, four of the second. The even vectors
// have outputs 4i and 4i + 1, the odd ones 4i + 2 and 4i + 3, in which order a narrowing puts them side by side.
struct CodePair {
  TileBits even, odd;
};
template <bool AreFew>
inline CodePair load_codes(const uint8_t* nibbles) {
  const __m512i v = load_tile_bits(nibbles), low = _mm512_set1_epi32(0x00000f0f), high = _mm512_set1_epi32(0x0f0f0000);
  const auto select = [&](__m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(_mm512_and_si512(a, low), b, high, 0xf8);  // (a & low) | (b & high)
  };
  const __m512i first = select(v, _mm512_slli_epi32(v, 12));
  const __m512i second = select(_mm512_srli_epi32(v, 16), _mm512_srli_epi32(v, 4));
  return {_mm512_unpacklo_epi32(first, second), _mm512_unpackhi_epi32(first, second)};
}
// A lone row does not pay for putting nibbles in order: its products are taken in int16, of nibbles as they lie.
constexpr int kFewRows = 1;
template <>
inline CodePair load_codes<true>(const uint8_t* nibbles) {
  const __m512i v = load_tile_bits(nibbles), mask = _mm512_set1_epi8(15);
  return {_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi16(v, 4), mask)};
}

// Fours of the two half groups alternate.
constexpr int code_input(int i) { return i / 8 * 4 + i % 4 + (i & 4 ? 16 : 0); }

template <bool AreFew>
struct CodeSums {
  __m512i even, odd;  // int32: of the first half and of the second in turn; each sum fits in an int16

  inline __attribute__((always_inline)) void begin(const int8_t*) {}
  inline __attribute__((always_inline)) void add(int j, TileBits w, const int8_t* x) {
    int64_t fours;
    memcpy(&fours, x + j / 2 * 8, 8);
    __m512i& sums = j % 2 ? odd : even;
    sums = _mm512_dpbusd_epi32(j < 2 ? _mm512_setzero_si512() : sums, w, _mm512_set1_epi64(fours));
  }
  inline __attribute__((always_inline)) TileBits weigh(const int16_t* multipliers) const {
    int32_t pair;
    memcpy(&pair, multipliers, 4);
    return _mm512_madd_epi16(_mm512_packs_epi32(even, odd), _mm512_set1_epi32(pair));
  }
};
template <>
struct CodeSums<true> {
  __m512i sums;                     // int16: of the first half and of the second in turn
  alignas(32) int32_t in_order[8];  // the row's codes, as the nibbles lie

  inline __attribute__((always_inline)) void begin(const int8_t* x) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    store_bits(in_order, _mm256_shuffle_epi8(load_bits(x), order));
  }
  inline __attribute__((always_inline)) void add(int j, TileBits w, const int8_t*) {
    const __m512i products = _mm512_maddubs_epi16(w, _mm512_set1_epi32(in_order[j]));
    sums = j == 0 ? products : _mm512_add_epi16(sums, products);
  }
  inline __attribute__((always_inline)) TileBits weigh(const int16_t* multipliers) const {
    int32_t pair;
    memcpy(&pair, multipliers, 4);
    return _mm512_madd_epi16(sums, _mm512_set1_epi32(pair));
  }
};

struct WideSums {
  __m512i sums;

  inline __attribute__((always_inline)) void add(int p, TileBits w, const int16_t* x) {
    int32_t pair;
    memcpy(&pair, x + 2 * p, 4);
    sums = _mm512_dpwssd_epi32(p == 0 ? _mm512_setzero_si512() : sums, w, _mm512_set1_epi32(pair));
  }
  TileBits total() const { return sums; }
};

// Into the second-level cache, which has room for more lines under way than the first: a step of 8 sequences takes 0.97
// of the time.
inline void prefetch_weights(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p))); }

inline Bits256 pack_codes(Bits256 a, Bits256 b, Bits256 c, Bits256 d) {
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, c), _mm256_packs_epi32(b, d));
  return _mm256_permute4x64_epi64(bytes, 0xd8);
}
inline Bits256 weigh_codes(Bits256 codes, const int16_t* multipliers) {
  const __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), set_bytes(1), codes);  // halves alternate
  // Sums of four codes fit in an int16, whose other half meets no multiplier.
  const __m256i pair = broadcast_32(multipliers);
  const __m256i each =
      _mm256_mask_mov_epi32(_mm256_and_si256(pair, _mm256_set1_epi32(0xffff)), 0xaa, _mm256_srli_epi32(pair, 16));
  return _mm256_madd_epi16(sums, each);
}

}  // namespace
}  // namespace ropeway
