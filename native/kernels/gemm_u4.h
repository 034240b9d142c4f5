// 4-bit weights x int8 activations. Per group of 32 inputs and output: the 4 products of a lane's byte pairs in each
// half are summed in int16 (at most 4 * 2 * 15 * 127 = 15240), widened as they are multiplied by the half's multiplier,
// and the halves (together below 2^30) added as
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

template <bool HasMin>
struct GemmU4 {
  using Packed = PackedU4<HasMin>;
  using Panel = PanelU4;
  static constexpr int kStepInputs = kGroup;
  static constexpr int kPanelSteps = 16;  // 10 KB
  // With 6 rows, twelve first halves go to memory: 4 to 8 % slower.
  static constexpr int kRows = kTileRows < 4 ? kTileRows : 4;
  static constexpr int kDirectRows = 8;

  static void unpack(const uint8_t* packed, int count, uint8_t* panel) {
    for (int g = 0; g < count; g++, packed += Packed::kStepBytes, panel += Panel::kStepBytes) {
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

  // s[i] = the sums of half group `part` for row i, times its multiplier.
  template <class Source, int Rows>
  static void multiply_half(const Source& w, int part, const CodedGroup* groups, int num_groups,
                            Bits256 (&s)[Rows][2]) {
    ROPEWAY_UNROLL
    for (int j = 0; j < 4; j++) {
      const Bits256 w0 = w.codes(4 * part + j, 0), w1 = w.codes(4 * part + j, 1);
      ROPEWAY_UNROLL
      for (int i = 0; i < Rows; i++) {
        const Bits256 x = broadcast_32(groups[size_t(i) * num_groups].codes + kHalfGroup * part + 4 * j);
        const Bits256 p0 = dot_u8_i8(w0, x), p1 = dot_u8_i8(w1, x);
        if (j)
          accumulate_i16(s[i][0], p0);
        else
          s[i][0] = p0;
        if (j)
          accumulate_i16(s[i][1], p1);
        else
          s[i][1] = p1;
      }
    }
    ROPEWAY_UNROLL
    for (int i = 0; i < Rows; i++) {
      const Bits256 multiplier = broadcast_32(groups[size_t(i) * num_groups].multipliers[part]);
      s[i][0] = dot_i16(s[i][0], multiplier);
      s[i][1] = dot_i16(s[i][1], multiplier);
    }
  }

  template <class Source, int Rows>
  static void multiply(const uint8_t* weights, StepRange steps, const Activations& a, int row, float* acc) {
    const int num_groups = a.k / kGroup;
    const CodedGroup* groups = a.coded + size_t(row) * num_groups + steps.begin;
    for (int g = 0; g < steps.count; g++, weights += Source::kStepBytes, groups++) {
      const Source w{weights};
      if constexpr (is_same<Source, Packed>) prefetch_ahead<Source>(weights);
      Bits256 first[Rows][2], second[Rows][2];  // the first go to memory: the registers belong to the second
      multiply_half(w, 0, groups, num_groups, first);
      multiply_half(w, 1, groups, num_groups, second);
      ROPEWAY_UNROLL
      for (int i = 0; i < Rows; i++) {
        const F32x8 sum = broadcast_f32(&groups[size_t(i) * num_groups].sum);
        ROPEWAY_UNROLL
        for (int half = 0; half < 2; half++) {
          float* to = acc + i * kTileColumns + half * kLanes;
          const F32x8 t = fma(i32_to_f32(add_i32(first[i][half], second[i][half])), w.scale(half), load_f32(to));
          store_f32(to, fma(w.min(half), sum, t));
        }
      }
    }
  }
};

}  // namespace
}  // namespace ropeway
