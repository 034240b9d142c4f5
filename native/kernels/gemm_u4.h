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
  F32x8 scale(int half) const {
    return load_f16(reinterpret_cast<const uint16_t*>(group + kCodeBytes) + half * kLanes);
  }
  F32x8 min(int half) const {
    if constexpr (HasMin) {
      return load_f16(reinterpret_cast<const uint16_t*>(group + kCodeBytes) + kTileColumns + half * kLanes);
    } else {
      return mul(scale(half), set_f32(-8.0f));
    }
  }
};

// Weights unpacked: a byte per code, float32 scales.
struct PanelU4 {
  static constexpr int kCodeBytes = kGroup * kTileColumns;
  static constexpr int kStepBytes = kCodeBytes + 8 * kTileColumns;
  const uint8_t* group;
  Bits256 codes(int j, int half) const { return load_bits(group + (j * 2 + half) * 32); }
  F32x8 scale(int half) const { return load_f32(reinterpret_cast<const float*>(group + kCodeBytes) + half * kLanes); }
  F32x8 min(int half) const {
    return load_f32(reinterpret_cast<const float*>(group + kCodeBytes) + kTileColumns + half * kLanes);
  }
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

  template <class Source>
  ROPEWAY_INLINE void add_to(float* acc, const Source& w, const CodedGroup* group, int num_groups) const {
    const Bits256 multipliers = broadcast_32(group->multipliers);
    const F32x8 a_sum = broadcast_f32(&group->sum);
    const F32x8 t0 = fma(i32_to_f32(dot_i16(sums[0], multipliers)), w.scale(0), load_f32(acc));
    const F32x8 t1 = fma(i32_to_f32(dot_i16(sums[1], multipliers)), w.scale(1), load_f32(acc + kLanes));
    store_f32(acc, fma(w.min(0), a_sum, t0));
    store_f32(acc + kLanes, fma(w.min(1), a_sum, t1));
    rest.add_to(acc + kTileColumns, w, group + num_groups, num_groups);
  }
};
template <>
struct SumsU4<0> {
  void add(bool, Bits256, Bits256, const CodedGroup*, int, int) {}
  template <class Source>
  void add_to(float*, const Source&, const CodedGroup*, int) const {}
};

template <bool HasMin>
struct GemmU4 {
  using Packed = PackedU4<HasMin>;
  using Panel = PanelU4;
  static constexpr int kStepInputs = kGroup;
  static constexpr int kDirectSteps = 48;  // 15 KB
  static constexpr int kPanelSteps = 12;   // 8 KB
  static constexpr int kRows = kTileRows;
  static constexpr int kDirectRows = 30;

  static void unpack(const uint8_t* packed, int count, uint8_t* panel) {
    for (int g = 0; g < count; g++, packed += Packed::kStepBytes, panel += Panel::kStepBytes) {
      prefetch_ahead<Packed, kPanelSteps>(packed);
      Packed from{packed};
      for (int j = 0; j < 8; j++) {
        store_bits(panel + (j * 2 + 0) * 32, from.codes(j, 0));
        store_bits(panel + (j * 2 + 1) * 32, from.codes(j, 1));
      }
      float* scales = reinterpret_cast<float*>(panel + Panel::kCodeBytes);
      for (int half = 0; half < 2; half++) {
        store_f32(scales + half * kLanes, from.scale(half));
        store_f32(scales + kTileColumns + half * kLanes, from.min(half));
      }
    }
  }

  static void finish(const Activations& a, int row, int num_rows, float* acc) {
    for (int r = 0; r < num_rows; r++, acc += kTileColumns) {
      const F32x8 scale = broadcast_f32(a.scales + row + r);
      store_f32(acc, mul(load_f32(acc), scale));
      store_f32(acc + kLanes, mul(load_f32(acc + kLanes), scale));
    }
  }

  template <class Source, int Rows>
  static void multiply(const uint8_t* weights, StepRange steps, const Activations& a, int row, float* acc, Fetch) {
    const int num_groups = a.k / kGroup;
    const CodedGroup* groups = a.coded + size_t(row) * num_groups + steps.begin;
    for (int g = 0; g < steps.count; g++, weights += Source::kStepBytes, groups++) {
      const Source w{weights};
      // Sharing the next block between row tiles (Fetch) is no faster here: 0.97 to 1.03 of the time.
      if constexpr (is_same<Source, Packed>) prefetch_ahead<Source, kDirectStepsAhead>(weights);
      SumsU4<Rows> sums;
      ROPEWAY_UNROLL
      for (int j = 0; j < 8; j++) sums.add(j == 0, w.codes(j, 0), w.codes(j, 1), groups, num_groups, j);
      sums.add_to(acc, w, groups, num_groups);
      forget_target(acc);
    }
  }
};

}  // namespace
}  // namespace ropeway
