// Rows of a model file's tensors as float32, one at a time: what an embedding reads.
#pragma once
#include "packing.h"

namespace ropeway {

// out[k] = the row's values: code * d, (code - 8) * d or code * d + m, each operation rounded to float32.
void dequantize_row(TensorType type, int k, const uint8_t* row, float* out);

}  // namespace ropeway
