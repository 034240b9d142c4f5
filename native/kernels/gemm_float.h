// Float weights x float32 activations: one chain of fused multiply-adds per output, inputs in ascending order.
#pragma once

namespace ropeway {
namespace {

struct SourceF32 {
  static constexpr int kStepBytes = 4 * kTileColumns;
  static TileF32 load(const uint8_t* p) { return load_tile(reinterpret_cast<const float*>(p)); }
};
struct SourceF16 {
  static constexpr int kStepBytes = 2 * kTileColumns;
  static TileF32 load(const uint8_t* p) { return load_tile_f16(reinterpret_cast<const uint16_t*>(p)); }
};
struct SourceBF16 {
  static constexpr int kStepBytes = 2 * kTileColumns;
  static TileF32 load(const uint8_t* p) { return load_tile_bf16(reinterpret_cast<const uint16_t*>(p)); }
};

template <class PackedSource>
struct GemmFloat {
  using Packed = PackedSource;
  using Panel = SourceF32;
  static constexpr int kStepInputs = 1;
  static constexpr int kDirectSteps = 256;  // 8 or 16 KB
  static constexpr int kPanelSteps = 256;   // 16 KB
  static constexpr int kStepsAhead = 64, kStepsPerFetch = 4;
  static constexpr int kRows = kTileRows, kColumns = 1;

  static void finish(const Activations&, int, int, float*) {}

  template <class Source, bool IsKept, int Rows>
  static void multiply(TileWeights weights, const Activations& a, int row, float* acc) {
    const float* x = a.x + row * a.ld_x + weights.steps.begin;
    const uint8_t* data = weights.data;
    uint8_t* panel = weights.panel;
    TileF32 s[Rows];
    ROPEWAY_UNROLL
    for (int i = 0; i < Rows; i++) s[i] = load_tile(acc + i * kTileColumns);
    const auto step = [&]() __attribute__((always_inline)) {
      const TileF32 w = Source::load(data);
      if constexpr (IsKept) {
        store_tile(reinterpret_cast<float*>(panel), w);
        panel += Panel::kStepBytes;
      }
      ROPEWAY_UNROLL
      for (int i = 0; i < Rows; i++) s[i] = fma(w, broadcast_tile(x + i * a.ld_x), s[i]);
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
    for (int i = 0; i < Rows; i++) store_tile(acc + i * kTileColumns, s[i]);
  }
};

}  // namespace
}  // namespace ropeway
