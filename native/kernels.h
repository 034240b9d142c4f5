// The seam between the executable and the kernels: one table of function pointers per instruction set, plain structs
// in.
//
// Every kernel works on a half-open range of rows or columns, so that the caller decides how work is shared between
// threads; the arithmetic of one output element has a fixed order whatever the range, the batch or the thread.
#pragma once
#include <cstddef>
#include <cstdint>

#include "sample_row.h"

namespace ropeway {

constexpr int kLanes = 8;         // outputs side by side in packed weights; keys and head entries per KV vector
constexpr int kGroup = 32;        // inputs of a block of quantised weights
constexpr int kHalfGroup = 16;    // inputs that share an activation multiplier
constexpr int kTileColumns = 16;  // packed weights come in tiles of this many outputs

enum class Form : uint8_t { U4, S8, F16, BF16, F32 };
// Column tiles that a product takes together, where there are so many: a broadcast of a row's codes feeds all of them.
constexpr int tiles_together(Form form) { return form == Form::S8 ? 2 : 1; }

// An [n, k] weight repacked at load: columns (outputs) in tiles of kTileColumns, padded with zeros to n_padded.
// The layout of `data` (64-byte aligned) belongs to packing.h and the gemm kernels.
struct PackedMatrix {
  Form form;
  bool has_min;  // U4 only: value = d * code + m with m stored; otherwise d * (code - 8)
  int32_t n, n_padded, k;
  const uint8_t* data;
};

// Input of a U4 group at place i of its packed codes: the pairs of the two halves alternate.
constexpr int packed_code_input(int i) { return i / 4 * 2 + (i & 1) + (i & 2 ? kHalfGroup : 0); }

constexpr int kMaxCode = 127;
constexpr int kMaxMultiplier = 1 << 14;
constexpr int kMaxWideCode = kMaxCode * 256;

// A row's 32 inputs for U4: x ~ scale of the row * multiplier of the half group * code, |code| <= kMaxCode,
// 1 <= multiplier <= kMaxMultiplier.
struct CodedGroup {
  int8_t codes[kGroup];    // in the order of Kernels::code_input
  int16_t multipliers[2];  // of each half: 32 bits to broadcast
  float sum;               // of multiplier * code over the group
};

// A row's 32 inputs for S8: x ~ scale * code, |code| <= kMaxWideCode.
struct WideGroup {
  int16_t codes[kGroup];
  float scale;
};

// Activations as the kernels read them, M rows of k inputs. x is always there; a quantised view (k a multiple of
// kGroup) where it has a reader, else null. A NaN or an infinity makes the scales that cover it NaN, and its codes 0.
struct Activations {
  const float* x;
  int64_t ld_x;  // floats between rows of x
  int32_t k;
  CodedGroup* coded;  // [M][k / kGroup], read by U4
  float* scales;      // [M], of `coded`
  WideGroup* wide;    // [M][k / kGroup], read by S8
};

// Rows of float32, `ld` floats apart; kernels that write one may read it in place.
struct RowsView {
  float* data;
  int64_t ld;
  int32_t width;
};

struct RopeShape {
  int32_t head_dim, rotary_dim;
  bool is_interleaved;
};

// The cache keeps, per block, layer and KV head, keys as [head_dim][block_size] and then values as
// [block_size][head_dim padded to kLanes], in f16; block_size is a multiple of kLanes.
// Where one token's keys and values go, for one layer.
struct KvSlot {
  uint16_t* block;      // this layer's KV head 0 in the token's block
  int64_t head_stride;  // f16s between KV heads
  int32_t num_kv_heads, head_dim, block_size;
  int32_t index;  // of the token in its block
};

constexpr int kKeySplit = 512;  // positions whose softmax is computed apart and then merged, in order

// Keys and values of a sequence, for one layer and KV head.
struct KvBlocks {
  const uint16_t* cache;  // this layer and KV head in block 0
  const int32_t* block_ids;
};

// Attention of num_rows rows of one sequence, at consecutive positions from `start`, for the `group` query heads that
// read one KV head.
struct AttentionTask {
  KvBlocks blocks;
  int64_t block_stride;  // f16s between blocks
  int32_t block_size, head_dim, group;
  int32_t start, num_rows;
  int32_t split_begin, split_end;  // splits [0, ceil((start + num_rows) / kKeySplit)), or a part of them
  float scale;
  const float* q;  // row 0's first head of the group; heads lie side by side
  int64_t ld_q;
  float* out;
  int64_t ld_out;
  KvBlocks next;          // what this thread attends to next,
  int32_t num_next_keys;  // and how much of it is worth fetching now
};

struct Kernels {
  const char* name;
  // Input of a CodedGroup at place i of its codes: what this set's products like best.
  int (*code_input)(int i);
  // Fills the quantised views that are there, for rows [row0, row1), from x.
  void (*quantize_rows)(const Activations& a, int row0, int row1);
  // out[r * ld_out + c] for rows [row0, row1) and columns [col0, col1); col0 is a multiple of kTileColumns,
  // col1 too unless it is n. Writes nothing outside the range.
  void (*gemm)(const PackedMatrix& w, const Activations& a, int row0, int row1, int col0, int col1, float* out,
               int64_t ld_out);

  void (*rms_norm)(const RowsView& x, const float* weight, float eps, const RowsView& out, int row);
  void (*add_rows)(const RowsView& a, const RowsView& b, const RowsView& out, int row);
  void (*add_bias)(const RowsView& x, const float* bias, int row);
  void (*silu_gate)(const RowsView& gate, const RowsView& up, const RowsView& out, int row);
  // turns[row][rotary_dim]: the cosines and then the sines of the row's pairs.
  void (*rope)(const RowsView& x, const RopeShape& shape, const float* turns, int row);
  void (*kv_write)(const float* k, const float* v, const KvSlot& slot);

  // Writes task.out; or, given partials, only the states of splits [split_begin, split_end) at
  // partials[split][num_rows * group][attention_state_floats], for attention_merge to finish. The bits are the same.
  void (*attention)(const AttentionTask& task, float* partials, float* scratch);
  // Merges splits [0, split_end) in order and writes task.out.
  void (*attention_merge)(const AttentionTask& task, float* partials);
  int64_t (*attention_scratch_floats)(int num_rows, int group, int head_dim);
  int (*attention_state_floats)(int head_dim);
  // Draws one token of a row of logits.
  SampleDraw (*sample_row)(const SampleRow& row, const SampleScratch& scratch);
  // Fills the outputs of row; NaN where the logits hold one.
  void (*logprob_row)(const LogprobRow& row, const SampleScratch& scratch);
};

}  // namespace ropeway
