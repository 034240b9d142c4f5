// The 16 columns of a weight tile as two vectors of eight: tile vectors for instruction sets of 256 bits. An
// instruction set with wider vectors has its own, under the same names and with the same bits.
//
// Written over vec/*.h, which it follows; knows no kernels.
#pragma once

namespace ropeway {
namespace {

constexpr int kTileRows = kPairTileRows;
constexpr int kMinPanelTiles = 3;  // row tiles for which unpacking pays: with two it takes 1.08 times as long
constexpr int kFewRows = 0;        // rows so few that their codes are multiplied in another way

constexpr bool kHasWideTiles = false;  // whether a TileF32 is one register
struct TileF32 {
  F32x8 low, high;
};
struct TileBits {
  Bits256 low, high;
};

inline TileF32 load_tile(const float* p) { return {load_f32(p), load_f32(p + 8)}; }
inline TileF32 load_tile_f16(const uint16_t* p) { return {load_f16(p), load_f16(p + 8)}; }
inline TileF32 load_tile_bf16(const uint16_t* p) { return {load_bf16(p), load_bf16(p + 8)}; }
inline TileF32 broadcast_tile(const float* p) {
  const F32x8 v = broadcast_f32(p);
  return {v, v};
}
inline TileF32 zero_tile() { return {zero_f32(), zero_f32()}; }
inline TileF32 set_tile(float x) { return {set_f32(x), set_f32(x)}; }
inline void store_tile(float* p, TileF32 v) {
  store_f32(p, v.low);
  store_f32(p + 8, v.high);
}
inline F32x8 low_half(TileF32 v) { return v.low; }
inline F32x8 high_half(TileF32 v) { return v.high; }
inline TileF32 mul(TileF32 a, TileF32 b) { return {mul(a.low, b.low), mul(a.high, b.high)}; }
inline TileF32 fma(TileF32 a, TileF32 b, TileF32 c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }

inline TileBits load_tile_bits(const void* p) { return {load_bits(p), load_bits(static_cast<const uint8_t*>(p) + 32)}; }
inline void store_tile_bits(void* p, TileBits v) {
  store_bits(p, v.low);
  store_bits(static_cast<uint8_t*>(p) + 32, v.high);
}
// 32 signed bytes at p as int16.
inline TileBits load_tile_i8_as_i16(const int8_t* p) { return {load_i8_as_i16(p), load_i8_as_i16(p + 16)}; }
inline TileF32 i32_to_f32(TileBits v) { return {i32_to_f32(v.low), i32_to_f32(v.high)}; }

// Code vectors 2i and 2i + 1 of a group, a byte per code: what CodeSums takes.
struct CodePair {
  TileBits even, odd;
};
// From the i-th 64 bytes of the group's nibbles. Here every 32-bit lane has codes 4j .. 4j + 3 of vector j, whose
// inputs code_input names.
template <bool AreFew>
inline CodePair load_codes(const uint8_t* nibbles) {
  const TileBits v = load_tile_bits(nibbles);
  return {{low_nibbles(v.low), low_nibbles(v.high)}, {high_nibbles(v.low), high_nibbles(v.high)}};
}

// Pairs of the two half groups alternate, so that the int16 sums of byte pairs alternate too and one multiply-add
// weighs both halves.
constexpr int code_input(int i) { return i / 4 * 2 + (i & 1) + (i & 2 ? 16 : 0); }

// The products of a group's codes with the codes of one row, the sums of its two halves apart.
template <bool AreFew>
struct CodeSums {
  Bits256 low, high;

  // Comes before the first `add`.
  inline __attribute__((always_inline)) void begin(const int8_t*) {}
  // Adds the products of code vector j with the row's codes, which begin at x; the first begins the sums.
  inline __attribute__((always_inline)) void add(int j, TileBits w, const int8_t* x) {
    const Bits256 v = broadcast_32(x + 4 * j), p = dot_u8_i8(w.low, v), q = dot_u8_i8(w.high, v);
    if (j == 0) {
      low = p, high = q;
    } else {
      accumulate_i16(low, p);
      accumulate_i16(high, q);
    }
  }
  // int32 lanes: the sums of the halves, each times its multiplier.
  TileBits weigh(const int16_t* multipliers) const {
    const Bits256 m = broadcast_32(multipliers);
    return {dot_i16(low, m), dot_i16(high, m)};
  }
};

// The products of a group's int16 codes with those of one row.
struct WideSums {
  Bits256 low, high;

  // Adds those of input pair p of a row whose codes begin at x; the first begins the sums.
  inline __attribute__((always_inline)) void add(int p, TileBits w, const int16_t* x) {
    const Bits256 v = broadcast_32(x + 2 * p), a = dot_i16(w.low, v), b = dot_i16(w.high, v);
    if (p == 0) {
      low = a, high = b;
    } else {
      accumulate_i32(low, a);
      accumulate_i32(high, b);
    }
  }
  TileBits total() const { return {low, high}; }
};

// Of weights that a later step multiplies by.
inline void prefetch_weights(const void* p) { prefetch(p); }

// The 32 codes of a group from its inputs 0-7, 8-15, 16-23 and 24-31, which fit in a signed byte, in the order of
// code_input.
inline Bits256 pack_codes(Bits256 a, Bits256 b, Bits256 c, Bits256 d) { return i32_as_i8_pairs(a, b, c, d); }
// Lanes that add up to the sum of code times multiplier over a group.
inline Bits256 weigh_codes(Bits256 codes, const int16_t* multipliers) {
  return dot_i16(dot_u8_i8(set_bytes(1), codes), broadcast_32(multipliers));
}

}  // namespace
}  // namespace ropeway
