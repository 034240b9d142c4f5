// 8-bit weights x wide activations, in int16. Per group of 32 inputs and output: 16 pair products summed in int32
// (exact: at most 32 * 128 * kMaxWideCode < 2^28), then acc = fma(float(sum), d * a_scale, acc).
#pragma once

namespace ropeway {
namespace {

// Weights as packed: bytes, f16 scales.
struct PackedS8 {
  static constexpr int kCodeBytes = kGroup * kTileColumns;
  static constexpr int kStepBytes = kCodeBytes + 2 * kTileColumns;
  const uint8_t* group;
  TileBits codes(int p) const { return load_tile_i8_as_i16(reinterpret_cast<const int8_t*>(group + p * 32)); }
  TileF32 scale() const { return load_tile_f16(reinterpret_cast<const uint16_t*>(group + kCodeBytes)); }
};

// Weights unpacked: int16 codes, float32 scales.
struct PanelS8 {
  static constexpr int kCodeBytes = 2 * kGroup * kTileColumns;
  static constexpr int kStepBytes = kCodeBytes + 4 * kTileColumns;
  const uint8_t* group;
  TileBits codes(int p) const { return load_tile_bits(group + p * 64); }
  TileF32 scale() const { return load_tile(reinterpret_cast<const float*>(group + kCodeBytes)); }
};

// The int32 sums of a step, row by row; members for the reason of SumsU4.
template <int Rows, int Columns>
struct SumsS8 {
  WideSums sums[Columns];
  SumsS8<Rows - 1, Columns> rest;

  // Adds the products of input pair p, or starts with them.
  ROPEWAY_INLINE void add(int p, const TileBits* w, const WideGroup* group, int num_groups) {
    for (int c = 0; c < Columns; c++) sums[c].add(p, w[c], group->codes);
    rest.add(p, w, group + num_groups, num_groups);
  }

  ROPEWAY_INLINE void add_to(float* acc, const TileF32* scales, const WideGroup* group, int num_groups) const {
    const TileF32 scale = broadcast_tile(&group->scale);
    for (int c = 0; c < Columns; c++) {
      float* to = acc + c * kAccFloats;
      store_tile(to, fma(i32_to_f32(sums[c].total()), mul(scales[c], scale), load_tile(to)));
    }
    rest.add_to(acc + kTileColumns, scales, group + num_groups, num_groups);
  }
};
template <int Columns>
struct SumsS8<0, Columns> {
  void add(int, const TileBits*, const WideGroup*, int) {}
  void add_to(float*, const TileF32*, const WideGroup*, int) const {}
};

// Columns: the column tiles that share what is loaded of a row. With one, wide vectors want a broadcast for every
// multiply; with two, 2 * 12 sums, two vectors of weights and a broadcast fit the registers: 1.2 to 1.4 times as fast.
template <int Columns>
struct GemmS8 {
  using Packed = PackedS8;
  using Panel = PanelS8;
  static constexpr int kStepInputs = kGroup;
  static constexpr int kDirectSteps = 24 / Columns;  // 13 KB
  static constexpr int kPanelSteps = 12 / Columns;   // 13 KB
  static constexpr int kStepsAhead = 8, kStepsPerFetch = 1;
  static constexpr int kRows = kTileRows, kColumns = Columns;

  static void finish(const Activations&, int, int, float*) {}

  template <class Source, bool IsKept, int Rows>
  static void multiply(TileWeights weights, const Activations& a, int row, float* acc) {
    constexpr size_t kPanelBytes = kPanelSteps * PanelS8::kStepBytes;
    const int num_groups = a.k / kGroup;
    const WideGroup* groups = a.wide + size_t(row) * num_groups + weights.steps.begin;
    const uint8_t* data = weights.data;
    uint8_t* panel = weights.panel;
    for (int g = 0; g < weights.steps.count; g++, data += Source::kStepBytes, groups++) {
      weights.fetch.template step<Columns>();
      SumsS8<Rows, Columns> sums;
      ROPEWAY_UNROLL
      for (int p = 0; p < 16; p++) {
        TileBits codes[Columns];
        for (int c = 0; c < Columns; c++) {
          codes[c] = Source{data + c * weights.tile_bytes}.codes(p);
          if constexpr (IsKept) store_tile_bits(panel + c * kPanelBytes + p * 64, codes[c]);
        }
        sums.add(p, codes, groups, num_groups);
      }
      TileF32 scales[Columns];
      for (int c = 0; c < Columns; c++) {
        scales[c] = Source{data + c * weights.tile_bytes}.scale();
        if constexpr (IsKept)
          store_tile(reinterpret_cast<float*>(panel + c * kPanelBytes + PanelS8::kCodeBytes), scales[c]);
      }
      if constexpr (IsKept) panel += PanelS8::kStepBytes;
      sums.add_to(acc, scales, groups, num_groups);
      forget_target(acc);
    }
  }
};

}  // namespace
}  // namespace ropeway
