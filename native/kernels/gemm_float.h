// Float weights x float32 activations: one chain of fused multiply-adds per output, inputs in ascending order.
#pragma once

namespace ropeway {
namespace {

struct SourceF32 {
  static constexpr int kStepBytes = 4 * kTileColumns;
  static F32x8 load(const uint8_t* p, int half) { return load_f32(reinterpret_cast<const float*>(p) + half * kLanes); }
};
struct SourceF16 {
  static constexpr int kStepBytes = 2 * kTileColumns;
  static F32x8 load(const uint8_t* p, int half) {
    return load_f16(reinterpret_cast<const uint16_t*>(p) + half * kLanes);
  }
};
struct SourceBF16 {
  static constexpr int kStepBytes = 2 * kTileColumns;
  static F32x8 load(const uint8_t* p, int half) {
    return load_bf16(reinterpret_cast<const uint16_t*>(p) + half * kLanes);
  }
};

template <class PackedSource>
struct GemmFloat {
  using Packed = PackedSource;
  using Panel = SourceF32;
  static constexpr int kStepInputs = 1;
  static constexpr int kDirectSteps = 256;  // 8 or 16 KB
  static constexpr int kPanelSteps = 256;   // 16 KB
  static constexpr int kRows = kTileRows;
  static constexpr int kDirectRows = 12;

  static void unpack(const uint8_t* packed, int count, uint8_t* panel) {
    for (int i = 0; i < count; i++, packed += Packed::kStepBytes, panel += Panel::kStepBytes) {
      store_f32(reinterpret_cast<float*>(panel), Packed::load(packed, 0));
      store_f32(reinterpret_cast<float*>(panel) + kLanes, Packed::load(packed, 1));
    }
  }

  static void finish(const Activations&, int, int, float*) {}

  template <class Source, int Rows>
  static void multiply(const uint8_t* weights, StepRange steps, const Activations& a, int row, float* acc, Fetch) {
    const float* x = a.x + row * a.ld_x + steps.begin;
    F32x8 s[Rows][2];
    ROPEWAY_UNROLL
    for (int i = 0; i < Rows; i++) {
      s[i][0] = load_f32(acc + i * kTileColumns);
      s[i][1] = load_f32(acc + i * kTileColumns + kLanes);
    }
    for (int k = 0; k < steps.count; k++, weights += Source::kStepBytes, x++) {
      const F32x8 w0 = Source::load(weights, 0), w1 = Source::load(weights, 1);
      ROPEWAY_UNROLL
      for (int i = 0; i < Rows; i++) {
        const F32x8 v = broadcast_f32(x + i * a.ld_x);
        s[i][0] = fma(w0, v, s[i][0]);
        s[i][1] = fma(w1, v, s[i][1]);
      }
    }
    ROPEWAY_UNROLL
    for (int i = 0; i < Rows; i++) {
      store_f32(acc + i * kTileColumns, s[i][0]);
      store_f32(acc + i * kTileColumns + kLanes, s[i][1]);
    }
  }
};

}  // namespace
}  // namespace ropeway
