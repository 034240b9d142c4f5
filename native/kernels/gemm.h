// The gemm entry of the kernel table: picks the kernel of the weight's form.
#pragma once

namespace ropeway {
namespace {

void gemm(const PackedMatrix& w, const Activations& a, int row0, int row1, int col0, int col1, float* out,
          int64_t ld_out) {
  switch (w.form) {
    case Form::U4:
      if (w.has_min) return gemm_tiles<GemmU4<true>>(w, a, row0, row1, col0, col1, out, ld_out);
      return gemm_tiles<GemmU4<false>>(w, a, row0, row1, col0, col1, out, ld_out);
    case Form::S8:
      if constexpr (kHasWideTiles) {
        constexpr int kTogether = tiles_together(Form::S8);
        const int num_tiles = (col1 - col0 + kTileColumns - 1) / kTileColumns, rest = num_tiles % kTogether;
        const int end = rest == 0 ? col1 : col0 + (num_tiles - rest) * kTileColumns;
        if (col0 < end) gemm_tiles<GemmS8<kTogether>>(w, a, row0, row1, col0, end, out, ld_out);
        col0 = end;
      }
      if (col0 < col1) gemm_tiles<GemmS8<1>>(w, a, row0, row1, col0, col1, out, ld_out);
      return;
    case Form::F16:
      return gemm_tiles<GemmFloat<SourceF16>>(w, a, row0, row1, col0, col1, out, ld_out);
    case Form::BF16:
      return gemm_tiles<GemmFloat<SourceBF16>>(w, a, row0, row1, col0, col1, out, ld_out);
    case Form::F32:
      return gemm_tiles<GemmFloat<SourceF32>>(w, a, row0, row1, col0, col1, out, ld_out);
  }
}

}  // namespace
}  // namespace ropeway
