// 4-bit weights x int8 activations. Per group of 32 inputs and output: the 8 products of a lane's byte pairs are summed
// in int16 (at most 8 * 2 * 15 * 127 = 30480), widened once, and added as
//   acc = fma(float(sum), d * a_scale, acc);  acc = fma(m, a_sum, acc)        with m = -8 d where the file stores none.
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
  static constexpr int kDirectRows = 4;

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

  template <class Source, int Rows>
  static void multiply(const uint8_t* weights, StepRange steps, const Activations& a, int row, float* acc) {
    const int num_groups = a.k / kGroup;
    const int8_t* codes = a.codes + size_t(row) * a.k + size_t(steps.begin) * kGroup;
    const float* scales = a.scales + size_t(row) * num_groups + steps.begin;
    const float* sums = a.sums + size_t(row) * num_groups + steps.begin;
    for (int g = 0; g < steps.count; g++, weights += Source::kStepBytes, codes += kGroup) {
      const Source w{weights};
      Bits256 s[Rows][2];
      ROPEWAY_UNROLL
      for (int j = 0; j < 8; j++) {
        const Bits256 w0 = w.codes(j, 0), w1 = w.codes(j, 1);
        ROPEWAY_UNROLL
        for (int i = 0; i < Rows; i++) {
          const Bits256 x = broadcast_32(codes + size_t(i) * a.k + 4 * j);
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
        const F32x8 scale = broadcast_f32(scales + size_t(i) * num_groups + g),
                    sum = broadcast_f32(sums + size_t(i) * num_groups + g);
        ROPEWAY_UNROLL
        for (int half = 0; half < 2; half++) {
          float* to = acc + i * kTileColumns + half * kLanes;
          const F32x8 t = fma(i32_to_f32(pair_sums_i16(s[i][half])), mul(w.scale(half), scale), load_f32(to));
          store_f32(to, fma(w.min(half), sum, t));
        }
      }
    }
  }
};

}  // namespace
}  // namespace ropeway
