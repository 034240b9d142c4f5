// 4-bit weights x int8 activations. Per group of 32 inputs and output: byte pairs of the two half groups alternate, so
// the 8 products of a lane leave the sum of each half (at most 16 * 15 * 127 = 30480) in an int16 of its own, and one
// multiply-add weighs both with their multipliers (together below 2^30):
//   acc = fma(float(sum), d, acc);  acc = fma(m, a_sum, acc)                  with m = -8 d where the file stores none.
// The row's scale multiplies the finished acc: with multipliers of 15 bits, one scale serves a row, and a step of 16
// inputs costs as many operations as a step of 32 with a float scale each.
#pragma once

namespace ropeway {
namespace {

// Weights as packed: nibbles, f16 scales.
template <bool HasMin>
struct PackedU4 {
  static constexpr int kCodeBytes = kGroup * kTileColumns / 2;
  static constexpr int kStepBytes = kCodeBytes + (HasMin ? 4 : 2) * kTileColumns;
  const uint8_t* group;
  template <bool AreFew>
  CodePair codes(int i) const {
    return load_codes<AreFew>(group + i * 64);
  }
  // d[16] and m[16] as float32, once a step: compilers would convert them for every row.
  void scales(float* out) const {
    const uint16_t* d = reinterpret_cast<const uint16_t*>(group + kCodeBytes);
    const TileF32 scale = load_tile_f16(d);
    store_tile(out, scale);
    store_tile(out + kTileColumns, HasMin ? load_tile_f16(d + kTileColumns) : mul(scale, set_tile(-8.0f)));
  }
};

// Weights unpacked: a byte per code, then d[16] and m[16] in float32.
struct PanelU4 {
  static constexpr int kCodeBytes = kGroup * kTileColumns;
  static constexpr int kStepBytes = kCodeBytes + 8 * kTileColumns;
  const uint8_t* group;
  template <bool AreFew>
  CodePair codes(int i) const {
    return {load_tile_bits(group + i * 128), load_tile_bits(group + i * 128 + 64)};
  }
};

// The sums of a step, row by row. Members and not an array: compilers unroll a loop over the rows too late to
// keep an array in registers, and a tile stored and read back once per step takes 1.15 times as long.
template <int Rows, bool AreFew>
struct SumsU4 {
  CodeSums<AreFew> sums;
  SumsU4<Rows - 1, AreFew> rest;

  ROPEWAY_INLINE void begin(const CodedGroup* group, int num_groups) {
    sums.begin(group->codes);
    rest.begin(group + num_groups, num_groups);
  }

  // Adds the products of code vector j, or starts with them.
  ROPEWAY_INLINE void add(int j, TileBits w, const CodedGroup* group, int num_groups) {
    sums.add(j, w, group->codes);
    rest.add(j, w, group + num_groups, num_groups);
  }

  // The same for code vectors 2i and 2i + 1, row by row.
  ROPEWAY_INLINE void add_both(int i, const CodePair& codes, const CodedGroup* group, int num_groups) {
    sums.add(2 * i, codes.even, group->codes);
    sums.add(2 * i + 1, codes.odd, group->codes);
    rest.add_both(i, codes, group + num_groups, num_groups);
  }

  // scales: d[16], m[16].
  ROPEWAY_INLINE void add_to(float* acc, const float* scales, const CodedGroup* group, int num_groups) const {
    const TileF32 a_sum = broadcast_tile(&group->sum);
    const TileF32 t = fma(i32_to_f32(sums.weigh(group->multipliers)), load_tile(scales), load_tile(acc));
    store_tile(acc, fma(load_tile(scales + kTileColumns), a_sum, t));
    rest.add_to(acc + kTileColumns, scales, group + num_groups, num_groups);
  }
};
template <bool AreFew>
struct SumsU4<0, AreFew> {
  void begin(const CodedGroup*, int) {}
  void add(int, TileBits, const CodedGroup*, int) {}
  void add_both(int, const CodePair&, const CodedGroup*, int) {}
  void add_to(float*, const float*, const CodedGroup*, int) const {}
};

template <bool HasMin>
struct GemmU4 {
  using Packed = PackedU4<HasMin>;
  using Panel = PanelU4;
  static constexpr int kStepInputs = kGroup;
  static constexpr int kDirectSteps = 24;  // 8 KB
  static constexpr int kPanelSteps = 12;   // 8 KB
  static constexpr int kStepsAhead = 8, kStepsPerFetch = 1;
  static constexpr int kRows = kTileRows, kColumns = 1;

  static void finish(const Activations& a, int row, int num_rows, float* acc) {
    for (int r = 0; r < num_rows; r++, acc += kTileColumns) {
      store_tile(acc, mul(load_tile(acc), broadcast_tile(a.scales + row + r)));
    }
  }

  template <class Source, bool IsKept, int Rows>
  static void multiply(TileWeights weights, const Activations& a, int row, float* acc) {
    constexpr bool kAreFew = Rows <= kFewRows && is_same<Source, Packed> && !IsKept;
    const int num_groups = a.k / kGroup;
    const CodedGroup* groups = a.coded + size_t(row) * num_groups + weights.steps.begin;
    const uint8_t* data = weights.data;
    uint8_t* panel = weights.panel;
    alignas(64) float local[2 * kTileColumns];
    for (int g = 0; g < weights.steps.count; g++, data += Source::kStepBytes, groups++) {
      const Source w{data};
      weights.fetch.step();
      SumsU4<Rows, kAreFew> sums;
      sums.begin(groups, num_groups);
      ROPEWAY_UNROLL
      for (int i = 0; i < 4; i++) {
        const CodePair codes = w.template codes<kAreFew>(i);
        if constexpr (IsKept) {
          store_tile_bits(panel + i * 128, codes.even);
          store_tile_bits(panel + i * 128 + 64, codes.odd);
        }
        if constexpr (kHasWideTiles) {
          // Both vectors meet the same codes of a row, whose broadcast would wait in a register for the second.
          sums.add_both(i, codes, groups, num_groups);
        } else {
          sums.add(2 * i, codes.even, groups, num_groups);
          sums.add(2 * i + 1, codes.odd, groups, num_groups);
        }
      }
      float* scales = local;
      if constexpr (is_same<Source, PanelU4>) {
        scales = reinterpret_cast<float*>(const_cast<uint8_t*>(data) + PanelU4::kCodeBytes);
      } else {
        if constexpr (IsKept) scales = reinterpret_cast<float*>(panel + PanelU4::kCodeBytes);
        w.scales(scales);
        forget_target(scales);
      }
      sums.add_to(acc, scales, groups, num_groups);
      forget_target(acc);
      if constexpr (IsKept) panel += PanelU4::kStepBytes;
    }
  }
};

}  // namespace
}  // namespace ropeway
