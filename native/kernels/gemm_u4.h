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
  Bits256 codes(int j, int half) const {
    Bits256 v = load_bits(group + ((j / 2) * 2 + half) * 32);
    return j % 2 ? high_nibbles(v) : low_nibbles(v);
  }
  // d[16] and m[16] as float32, once a step: compilers would convert them for every row.
  void scales(float* out) const {
    const uint16_t* d = reinterpret_cast<const uint16_t*>(group + kCodeBytes);
    for (int i = 0; i < kTileColumns; i += kLanes) {
      const F32x8 scale = load_f16(d + i);
      store_f32(out + i, scale);
      store_f32(out + kTileColumns + i, HasMin ? load_f16(d + kTileColumns + i) : mul(scale, set_f32(-8.0f)));
    }
  }
};

// Weights unpacked: a byte per code, then d[16] and m[16] in float32.
struct PanelU4 {
  static constexpr int kCodeBytes = kGroup * kTileColumns;
  static constexpr int kStepBytes = kCodeBytes + 8 * kTileColumns;
  const uint8_t* group;
  Bits256 codes(int j, int half) const { return load_bits(group + (j * 2 + half) * 32); }
};

// The int16 sums of a step, row by row. Members and not an array: compilers unroll a loop over the rows too late to
// keep an array in registers, and a tile stored and read back once per step takes 1.15 times as long.
template <int Rows>
struct SumsU4 {
  Bits256 sums[2];
  SumsU4<Rows - 1> rest;

  // Adds the products of code vector j, or starts with them.
  ROPEWAY_INLINE void add(bool is_first, Bits256 w0, Bits256 w1, const CodedGroup* group, int num_groups, int j) {
    const Bits256 x = broadcast_32(group->codes + 4 * j);
    const Bits256 p0 = dot_u8_i8(w0, x), p1 = dot_u8_i8(w1, x);
    if (is_first) {
      sums[0] = p0, sums[1] = p1;
    } else {
      accumulate_i16(sums[0], p0);
      accumulate_i16(sums[1], p1);
    }
    rest.add(is_first, w0, w1, group + num_groups, num_groups, j);
  }

  // scales: d[16], m[16].
  ROPEWAY_INLINE void add_to(float* acc, const float* scales, const CodedGroup* group, int num_groups) const {
    const Bits256 multipliers = broadcast_32(group->multipliers);
    const F32x8 a_sum = broadcast_f32(&group->sum);
    const F32x8 t0 = fma(i32_to_f32(dot_i16(sums[0], multipliers)), load_f32(scales), load_f32(acc));
    const F32x8 t1 = fma(i32_to_f32(dot_i16(sums[1], multipliers)), load_f32(scales + kLanes), load_f32(acc + kLanes));
    store_f32(acc, fma(load_f32(scales + kTileColumns), a_sum, t0));
    store_f32(acc + kLanes, fma(load_f32(scales + kTileColumns + kLanes), a_sum, t1));
    rest.add_to(acc + kTileColumns, scales, group + num_groups, num_groups);
  }
};
template <>
struct SumsU4<0> {
  void add(bool, Bits256, Bits256, const CodedGroup*, int, int) {}
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
  static constexpr int kRows = kTileRows;

  static void finish(const Activations& a, int row, int num_rows, float* acc) {
    for (int r = 0; r < num_rows; r++, acc += kTileColumns) {
      const F32x8 scale = broadcast_f32(a.scales + row + r);
      store_f32(acc, mul(load_f32(acc), scale));
      store_f32(acc + kLanes, mul(load_f32(acc + kLanes), scale));
    }
  }

  template <class Source, bool IsKept, int Rows>
  static void multiply(TileWeights weights, const Activations& a, int row, float* acc) {
    const int num_groups = a.k / kGroup;
    const CodedGroup* groups = a.coded + size_t(row) * num_groups + weights.steps.begin;
    const uint8_t* data = weights.data;
    uint8_t* panel = weights.panel;
    alignas(64) float local[2 * kTileColumns];
    for (int g = 0; g < weights.steps.count; g++, data += Source::kStepBytes, groups++) {
      const Source w{data};
      weights.fetch.step();
      SumsU4<Rows> sums;
      ROPEWAY_UNROLL
      for (int j = 0; j < 8; j++) {
        const Bits256 w0 = w.codes(j, 0), w1 = w.codes(j, 1);
        if constexpr (IsKept) {
          store_bits(panel + (j * 2 + 0) * 32, w0);
          store_bits(panel + (j * 2 + 1) * 32, w1);
        }
        sums.add(j == 0, w0, w1, groups, num_groups, j);
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
