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
  static constexpr int kStepsAhead = 64, kStepsPerFetch = 4;
  static constexpr int kRows = kTileRows;

  static void finish(const Activations&, int, int, float*) {}

  template <class Source, bool IsKept, int Rows>
  static void multiply(TileWeights weights, const Activations& a, int row, float* acc) {
    const float* x = a.x + row * a.ld_x + weights.steps.begin;
    const uint8_t* data = weights.data;
    uint8_t* panel = weights.panel;
    F32x8 s[Rows][2];
    ROPEWAY_UNROLL
    for (int i = 0; i < Rows; i++) {
      s[i][0] = load_f32(acc + i * kTileColumns);
      s[i][1] = load_f32(acc + i * kTileColumns + kLanes);
    }
    const auto step = [&]() __attribute__((always_inline)) {
      const F32x8 w0 = Source::load(data, 0), w1 = Source::load(data, 1);
      if constexpr (IsKept) {
        store_f32(reinterpret_cast<float*>(panel), w0);
        store_f32(reinterpret_cast<float*>(panel) + kLanes, w1);
        panel += Panel::kStepBytes;
      }
      ROPEWAY_UNROLL
      for (int i = 0; i < Rows; i++) {
        const F32x8 v = broadcast_f32(x + i * a.ld_x);
        s[i][0] = fma(w0, v, s[i][0]);
        s[i][1] = fma(w1, v, s[i][1]);
      }
      data += Source::kStepBytes, x++;
    };
    int k = 0;
    for (; k + kStepsPerFetch <= weights.steps.count; k += kStepsPerFetch) {
      weights.fetch.step();
      ROPEWAY_UNROLL
      for (int i = 0; i < kStepsPerFetch; i++) step();
    }
    for (; k < weights.steps.count; k++) step();
    ROPEWAY_UNROLL
    for (int i = 0; i < Rows; i++) {
      store_f32(acc + i * kTileColumns, s[i][0]);
      store_f32(acc + i * kTileColumns + kLanes, s[i][1]);
    }
  }
};

}  // namespace
}  // namespace ropeway
