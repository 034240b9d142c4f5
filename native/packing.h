// Weights from the file's rows to the forms the gemm kernels read. Exact: every scale, min and code keeps its bits.
//
// Layouts, per tile of kTileColumns = 16 outputs, tiles one after another (column c = 16 * tile + 8 * half + lane):
//   U4          per group of 32 inputs: 4 x 2 vectors of 32 code bytes (byte 4 * lane + t of vector (j, half): place
//               8j + t of the group in the low nibble, 8j + 4 + t in the high one; packed_code_input says which input
//               that is), then f16 d[16], then f16 m[16] if has_min
//   S8          per group of 32 inputs: 16 x 2 vectors of 16 code bytes (byte 2 * lane + t of vector (p, half): input
//               2p + t), then f16 d[16]
//   F16 BF16 F32   per input: 16 values
// Knows no threads: pack_columns works on a range of columns, so that a pool can share a load.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels.h"

namespace ropeway {

enum class TensorType : uint8_t { F32, F16, BF16, Q8_0, Q4_0, Q4_1 };
// The type that GGUF calls so; throws std::invalid_argument for one that is not packed.
TensorType tensor_type(std::string_view name);

// Rows of a tensor as a GGUF file stores them: num_rows rows of k values, row_bytes(type, k) apart.
struct TensorRows {
  TensorType type;
  int32_t num_rows;
  const uint8_t* data;
};

// Bytes of one row of k values. k is a multiple of 32 for the quantised types.
size_t row_bytes(TensorType type, int k);

// The packed matrix (data null) that holds n outputs of k inputs of a type.
PackedMatrix packed_shape(TensorType type, int n, int k);

// Bytes of w.data.
size_t packed_bytes(const PackedMatrix& w);

// Packs columns [col0, col1) of the tensors' rows laid end to end into data, which belongs to w. All tensors have one
// type. col0 is a multiple of kTileColumns, col1 too unless it is n; the padding of the last tile is written.
void pack_columns(const PackedMatrix& w, std::span<const TensorRows> tensors, int col0, int col1, uint8_t* data);

// out[k] = output `row` of w, dequantised: code * d (U4: d * (code - 8), or d * code + m, in float32).
void unpack_row(const PackedMatrix& w, int row, float* out);

float f16_to_f32(uint16_t h);

}  // namespace ropeway
