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
template <int Rows>
struct SumsS8 {
  WideSums sums;
  SumsS8<Rows - 1> rest;

  // Adds the products of input pair p, or starts with them.
  ROPEWAY_INLINE void add(int p, TileBits w, const WideGroup* group, int num_groups) {
    sums.add(p, w, group->codes);
    rest.add(p, w, group + num_groups, num_groups);
  }

  ROPEWAY_INLINE void add_to(float* acc, TileF32 scale, const WideGroup* group, int num_groups) const {
    const TileF32 both = mul(scale, broadcast_tile(&group->scale));
    store_tile(acc, fma(i32_to_f32(sums.total()), both, load_tile(acc)));
    rest.add_to(acc + kTileColumns, scale, group + num_groups, num_groups);
  }
};
template <>
struct SumsS8<0> {
  void add(int, TileBits, const WideGroup*, int) {}
  void add_to(float*, TileF32, const WideGroup*, int) const {}
};

struct GemmS8 {
  using Packed = PackedS8;
  using Panel = PanelS8;
  static constexpr int kStepInputs = kGroup;
  static constexpr int kDirectSteps = 24;  // 13 KB
  static constexpr int kPanelSteps = 12;   // 13 KB
  static constexpr int kStepsAhead = 8, kStepsPerFetch = 1;
  static constexpr int kRows = kTileRows;

  static void finish(const Activations&, int, int, float*) {}

  template <class Source, bool IsKept, int Rows>
  static void multiply(TileWeights weights, const Activations& a, int row, float* acc) {
    const int num_groups = a.k / kGroup;
    const WideGroup* groups = a.wide + size_t(row) * num_groups + weights.steps.begin;
    const uint8_t* data = weights.data;
    uint8_t* panel = weights.panel;
    for (int g = 0; g < weights.steps.count; g++, data += Source::kStepBytes, groups++) {
      const Source w{data};
      weights.fetch.step();
      SumsS8<Rows> sums;
      ROPEWAY_UNROLL
      for (int p = 0; p < 16; p++) {
        const TileBits codes = w.codes(p);
        if constexpr (IsKept) store_tile_bits(panel + p * 64, codes);
        sums.add(p, codes, groups, num_groups);
      }
      const TileF32 scale = w.scale();
      if constexpr (IsKept) {
        store_tile(reinterpret_cast<float*>(panel + PanelS8::kCodeBytes), scale);
        panel += PanelS8::kStepBytes;
      }
      sums.add_to(acc, scale, groups, num_groups);
      forget_target(acc);
    }
  }
};

}  // namespace
}  // namespace ropeway
