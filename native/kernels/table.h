// Every kernel over the vector header included before, and the table of them. For the isa_*.cpp files alone: a new
// kernel is named here once.
#pragma once
#include <string.h>

#include "kernels.h"

// The kernels are written over the names of vec/*.h and of each other, so the order matters.
// clang-format off
#include "kernels/math.h"
#include "kernels/quantize.h"
#include "kernels/sample.h"
#include "kernels/logprobs.h"
#include "kernels/gemm_tile.h"
#include "kernels/gemm_u4.h"
#include "kernels/gemm_s8.h"
#include "kernels/gemm_float.h"
#include "kernels/gemm.h"
#include "kernels/attention.h"
#include "kernels/elementwise.h"
// clang-format on

namespace ropeway {
namespace {

constexpr Kernels kernel_table(const char* name) {
  return {
      .name = name,
      .code_input = code_input,
      .quantize_rows = quantize_rows,
      .gemm = gemm,
      .rms_norm = rms_norm,
      .add_rows = add_rows,
      .add_bias = add_bias,
      .silu_gate = silu_gate,
      .rope = rope,
      .kv_write = kv_write,
      .attention = attention,
      .attention_merge = attention_merge,
      .attention_scratch_floats = attention_scratch_floats,
      .attention_state_floats = attention_state_floats,
      .sample_row = sample_row,
      .logprob_row = logprob_row,
  };
}

}  // namespace
}  // namespace ropeway
