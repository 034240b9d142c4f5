// The seam between the executable and the kernels: one table of function pointers per instruction set, plain structs
// in.
//
// Every kernel works on a half-open range of rows or columns, so that the caller decides how work is shared between
// threads; the arithmetic of one output element has a fixed order whatever the range, the batch or the thread.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ropeway {

constexpr int kLanes = 8;         // outputs side by side in packed weights; keys and head entries per KV vector
constexpr int kGroup = 32;        // inputs that share one activation scale
constexpr int kTileColumns = 16;  // packed weights come in tiles of this many outputs

enum class Form : uint8_t { U4, S8, F16, BF16, F32 };

// An [n, k] weight repacked at load: columns (outputs) in tiles of kTileColumns, padded with zeros to n_padded.
// The layout of `data` (64-byte aligned) belongs to packing.h and the gemm kernels.
struct PackedMatrix {
  Form form;
  bool has_min;  // U4 only: value = d * code + m with m stored; otherwise d * (code - 8)
  int32_t n, n_padded, k;
  const uint8_t* data;
};

// Activations as the kernels read them, M rows of k inputs. x is always there; the quantised view (k a multiple of
// kGroup) where any reader is U4 or S8. A group that holds a NaN or an infinity has scale and sum NaN and codes 0.
struct Activations {
  const float* x;
  int64_t ld_x;  // floats between rows of x
  int32_t k;
  int8_t* codes;     // [M][k]           x ~ codes * scales[group]; read by U4
  int16_t* codes16;  // [M][k]           the same codes, wider; read by S8, null where no reader is S8
  float* scales;     // [M][k / kGroup]
  float* sums;       // [M][k / kGroup]  scale * sum of the group's codes
};

struct Kernels {
  const char* name;
  // Fills codes, codes16 unless null, scales and sums of rows [row0, row1) from x.
  void (*quantize_rows)(const Activations& a, int row0, int row1);
  // out[r * ld_out + c] for rows [row0, row1) and columns [col0, col1); col0 is a multiple of kTileColumns,
  // col1 too unless it is n. Writes nothing outside the range.
  void (*gemm)(const PackedMatrix& w, const Activations& a, int row0, int row1, int col0, int col1, float* out,
               int64_t ld_out);
};

}  // namespace ropeway
