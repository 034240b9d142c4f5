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

struct GemmS8 {
  using Packed = PackedS8;
  using Panel = PanelS8;
  static constexpr int kStepInputs = kGroup;
  static constexpr int kPanelSteps = 12;  // 13 KB
  static constexpr int kRows = kTileRows;
  static constexpr int kDirectRows = 2;

  static void unpack(const uint8_t* packed, int count, uint8_t* panel) {
    for (int g = 0; g < count; g++, packed += Packed::kStepBytes, panel += Panel::kStepBytes) {
      Packed from{packed};
      for (int p = 0; p < 16; p++) {
        store_bits(panel + (p * 2 + 0) * 32, from.codes(p, 0));
        store_bits(panel + (p * 2 + 1) * 32, from.codes(p, 1));
      }
      for (int half = 0; half < 2; half++) {
        store_f32(reinterpret_cast<float*>(panel + Panel::kCodeBytes) + half * kLanes, from.scale(half));
      }
    }
  }

  static void finish(const Activations&, int, int, float*) {}

  template <class Source, int Rows>
  static void multiply(const uint8_t* weights, StepRange steps, const Activations& a, int row, float* acc) {
    const int num_groups = a.k / kGroup;
    const WideGroup* groups = a.wide + size_t(row) * num_groups + steps.begin;
    for (int g = 0; g < steps.count; g++, weights += Source::kStepBytes, groups++) {
      const Source w{weights};
      if constexpr (is_same<Source, Packed>) prefetch_ahead<Source>(weights);
      Bits256 s[Rows][2];
      ROPEWAY_UNROLL
      for (int p = 0; p < 16; p++) {
        const Bits256 w0 = w.codes(p, 0), w1 = w.codes(p, 1);
        ROPEWAY_UNROLL
        for (int i = 0; i < Rows; i++) {
          const Bits256 x = broadcast_32(groups[size_t(i) * num_groups].codes + 2 * p);
          const Bits256 p0 = dot_i16(w0, x), p1 = dot_i16(w1, x);
          if (p)
            accumulate_i32(s[i][0], p0);
          else
            s[i][0] = p0;
          if (p)
            accumulate_i32(s[i][1], p1);
          else
            s[i][1] = p1;
        }
      }
      ROPEWAY_UNROLL
      for (int i = 0; i < Rows; i++) {
        const F32x8 scale = broadcast_f32(&groups[size_t(i) * num_groups].scale);
        ROPEWAY_UNROLL
        for (int half = 0; half < 2; half++) {
          float* to = acc + i * kTileColumns + half * kLanes;
          store_f32(to, fma(i32_to_f32(s[i][half]), mul(w.scale(half), scale), load_f32(to)));
        }
      }
    }
  }
};

}  // namespace
}  // namespace ropeway
