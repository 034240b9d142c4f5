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
  Bits256 codes(int p, int half) const {
    return load_i8_as_i16(reinterpret_cast<const int8_t*>(group + (p * 2 + half) * 16));
  }
  F32x8 scale(int half) const {
    return load_f16(reinterpret_cast<const uint16_t*>(group + kCodeBytes) + half * kLanes);
  }
};

// Weights unpacked: int16 codes, float32 scales.
struct PanelS8 {
  static constexpr int kCodeBytes = 2 * kGroup * kTileColumns;
  static constexpr int kStepBytes = kCodeBytes + 4 * kTileColumns;
  const uint8_t* group;
  Bits256 codes(int p, int half) const { return load_bits(group + (p * 2 + half) * 32); }
  F32x8 scale(int half) const { return load_f32(reinterpret_cast<const float*>(group + kCodeBytes) + half * kLanes); }
};

// The int32 sums of a step, row by row; members for the reason of SumsU4.
template <int Rows>
struct SumsS8 {
  Bits256 sums[2];
  SumsS8<Rows - 1> rest;

  // Adds the products of input pair p, or starts with them.
  ROPEWAY_INLINE void add(bool is_first, Bits256 w0, Bits256 w1, const WideGroup* group, int num_groups, int p) {
    const Bits256 x = broadcast_32(group->codes + 2 * p);
    const Bits256 p0 = dot_i16(w0, x), p1 = dot_i16(w1, x);
    if (is_first) {
      sums[0] = p0, sums[1] = p1;
    } else {
      accumulate_i32(sums[0], p0);
      accumulate_i32(sums[1], p1);
    }
    rest.add(is_first, w0, w1, group + num_groups, num_groups, p);
  }

  ROPEWAY_INLINE void add_to(float* acc, F32x8 scale0, F32x8 scale1, const WideGroup* group, int num_groups) const {
    const F32x8 scale = broadcast_f32(&group->scale);
    store_f32(acc, fma(i32_to_f32(sums[0]), mul(scale0, scale), load_f32(acc)));
    store_f32(acc + kLanes, fma(i32_to_f32(sums[1]), mul(scale1, scale), load_f32(acc + kLanes)));
    rest.add_to(acc + kTileColumns, scale0, scale1, group + num_groups, num_groups);
  }
};
template <>
struct SumsS8<0> {
  void add(bool, Bits256, Bits256, const WideGroup*, int, int) {}
  void add_to(float*, F32x8, F32x8, const WideGroup*, int) const {}
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
        const Bits256 w0 = w.codes(p, 0), w1 = w.codes(p, 1);
        if constexpr (IsKept) {
          store_bits(panel + (p * 2 + 0) * 32, w0);
          store_bits(panel + (p * 2 + 1) * 32, w1);
        }
        sums.add(p == 0, w0, w1, groups, num_groups, p);
      }
      const F32x8 scale0 = w.scale(0), scale1 = w.scale(1);
      if constexpr (IsKept) {
        float* scales = reinterpret_cast<float*>(panel + PanelS8::kCodeBytes);
        store_f32(scales, scale0);
        store_f32(scales + kLanes, scale1);
        panel += PanelS8::kStepBytes;
      }
      sums.add_to(acc, scale0, scale1, groups, num_groups);
      forget_target(acc);
    }
  }
};

}  // namespace
}  // namespace ropeway
