// A lowered Program with its weights and KV pool: `forward` runs one step. Knows shapes, not architectures; the Python
// side (backends/native.py) decides which ops share a phase.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "call_times.h"
#include "kernels.h"
#include "memory.h"
#include "packing.h"
#include "thread_pool.h"
#include "tile_chunks.h"

namespace ropeway {

// The blocks of one cache group. Strides count f16s; the layout inside a block is kernels.h's.
struct KvPool {
  KvPool(int num_layers, int num_kv_heads, int head_dim, int block_size, int num_blocks);

  // KV head 0 of a layer in block 0.
  uint16_t* layer(int index) const {
    return static_cast<uint16_t*>(memory.data()) + index * num_kv_heads * head_stride;
  }

  int num_layers, num_kv_heads, head_dim;
  int64_t head_stride, block_stride;
  LazyZeros memory;
};

enum class RowOpKind : uint8_t { Turns, Embed, Norm, Bias, Quantize, Rope, KvWrite, SiluGate, Add, SelectRows };

// One op on rows: out, a, b are buffers; `table` is a vector (Norm, Bias), an embedding (Embed), turns (Turns, Rope) or
// a cache group (KvWrite, of layer `layer`, a = keys, b = values).
struct RowOp {
  RowOpKind kind;
  int out = 0, a = 0, b = 0, table = 0, layer = 0;
  float eps = 0.0f;
  RopeShape rope_shape = {};
};

struct Product {
  int matrix, out;
};

struct AttentionOp {
  int out, q, group, layer, num_heads;
  float scale;
};

struct BlockTableView {
  std::span<const int32_t> block_ids;
  std::span<const int64_t> offsets;
};

// backends/batch.py's LayerSlice.
struct LayerSlice {
  int index, count;
};

// backends/batch.py's ForwardBatch.
struct ForwardBatch {
  std::span<const int32_t> token_ids, positions, query_indptr, kv_lens, out_rows;
  std::vector<BlockTableView> tables;
  std::optional<LayerSlice> layer_slice = {};
};

struct PhaseTime {
  std::string label;
  int64_t num_runs = 0;
  int64_t total_ns = 0;
};

class Executable {
 public:
  Executable(const Kernels& kernels, ThreadPool& pool, int block_size, int num_kv_blocks);

  // Parts; each returns its index. Those that take `data` refuse a wrong size (std::invalid_argument).
  int add_buffer(int width);
  int add_cache_group(int num_layers, int num_kv_heads, int head_dim);
  int add_matrix(TensorType type, int n, int k, std::span<const uint8_t> data);     // repacked; data is not kept
  int add_embedding(TensorType type, int n, int k, std::span<const uint8_t> data);  // data must outlive the executable
  int add_tied_embedding(int matrix);  // rows of a matrix as it is packed, so that a tied one is there once
  int add_vector(std::span<const float> values);
  int add_turns(std::span<const double> frequencies);  // radians per position of each pair

  // Phases, in order. `is_selected`: runs on the rows whose logits are wanted. An op refuses buffers of the wrong
  // width.
  void add_rows_phase(std::string label, bool is_selected, std::vector<RowOp> ops);
  void add_product_phase(std::string label, bool is_selected, int x, std::vector<Product> products);
  void add_attention_phase(std::string label, AttentionOp op);
  void set_logits(int buffer);
  // A boundary between layers, before the next phase: rows that stop here go on from these buffers, and the turns.
  void add_cut(std::vector<int> buffers);

  // Copies whole blocks of one cache group, pair after pair; refuses ids outside the pool (std::invalid_argument).
  void copy_blocks(int group, std::span<const int32_t> source_ids, std::span<const int32_t> destination_ids);

  // logits[R][vocab]; a later forward may write elsewhere but never frees them under a holder.
  std::shared_ptr<float[]> forward(const ForwardBatch& batch);

  CallTimes last_call;  // written by whoever holds the interpreter lock around `forward`

  int num_layers() const { return static_cast<int>(cuts_.size()) + 1; }  // that a slice can be made of
  int vocab_size() const { return buffers_.at(logits_buffer_).width; }
  int64_t packed_bytes() const { return packed_bytes_; }
  int64_t kv_bytes() const;
  const Work& work() const { return work_; }
  void set_profiling(bool is_on);
  std::vector<PhaseTime> profile() const { return times_; }

 private:
  struct Buffer {
    int32_t width;
    int64_t ld;
    float* data = nullptr;
    bool is_coded = false, is_wide = false;  // has a reader of that view
    float* scales = nullptr;
    CodedGroup* coded = nullptr;
    WideGroup* wide = nullptr;
  };
  struct Embedding {
    int32_t n, k;
    std::optional<int> matrix = {};  // whose rows it reads; else rows of a file
    TensorType type = {};
    const uint8_t* data = nullptr;
  };
  struct Turns {
    std::vector<double> frequencies;
    float* rows = nullptr;  // [T][2 * pairs]
  };
  struct Phase {
    std::string label;
    bool is_selected = false;
    std::vector<RowOp> ops;
    int x = 0;
    std::vector<Product> products;
    std::vector<int32_t> first_tile;  // of each product, its tiles laid end to end; then their number
    TileChunks tile_chunks;           // this pass
    bool is_attention = false;
    AttentionOp attention = {};
    int attention_shape = 0;
    int32_t rows_per_chunk = 1;  // this pass
    int time = 0;
  };
  // Consecutive rows of one sequence in this pass.
  struct Segment {
    int32_t sequence, row0, num_rows, start;
  };
  // Rows of a segment and KV splits that one thread computes, per KV head.
  struct AttentionItem {
    int32_t segment, row, num_rows, split_begin, split_end, num_splits;
    int64_t partials;  // of KV head 0, in partials_, where splits are shared between threads
    int32_t counter;   // of KV head 0, in splits_done_
    bool is_shared;
  };
  struct AttentionChunk {
    int32_t item = 0, head_begin = 0, head_end = 0;  // KV heads
  };
  struct AttentionPlan {
    std::vector<AttentionItem> items = {};
    std::vector<AttentionChunk> chunks = {};
  };
  struct AttentionShape {
    int group, num_kv_heads, query_heads, head_dim;
    AttentionPlan full = {}, sliced = {};  // this pass: of the phases outside the slice, and in it
  };
  struct Cut {
    int phase;
    std::vector<int> buffers;
  };
  // The rows that run only through the phases phase_begin .. phase_end - 1 of this step, from the token on.
  struct Slice {
    int token, phase_begin, phase_end;
    const Cut *entry, *exit;  // null at the ends of the Program
    bool contains(int phase) const { return phase >= phase_begin && phase < phase_end; }
  };
  // What the last slice left for the next: `next` of `count`, of num_rows rows from this position on.
  struct Kept {
    int next = 0, count = 0, num_rows = 0, position = 0;
    std::vector<float> floats = {};  // of each row, its buffers and turns, one after another
  };

  void check_batch(const ForwardBatch& batch) const;
  void check_buffer(int buffer, int width, const char* what) const;
  void reserve_rows(int64_t num_rows);
  void run_pass(const ForwardBatch& batch, int token0, int token1, int out0, int out1);
  void count_work(int num_tokens, int num_full, int num_selected);
  void find_segments(const ForwardBatch& batch, int token0, int token1);
  void check_slice(const ForwardBatch& batch) const;
  Slice find_slice(const ForwardBatch& batch) const;
  void end_slice(const ForwardBatch& batch);
  template <class Copy>
  void each_kept(const Cut& cut, int num_full, int num_tokens, Copy&& copy);
  int64_t kept_floats() const;
  int num_rows(int phase, int num_tokens, int num_full, int num_selected) const;
  void plan_attention(const AttentionShape& shape, AttentionPlan& plan, int num_tokens);
  void share_attention(const AttentionShape& shape, AttentionPlan& plan);
  int32_t plan_phase(int index, int num_rows);
  const AttentionPlan& attention_plan(int phase) const;
  void run_rows(const Phase& phase, int row0, int row1);
  void run_row_op(const RowOp& op, int row);
  void run_product(const Phase& phase, int chunk, int num_rows);
  template <class IsDone>
  void fetch_next_product(int index, int thread, const IsDone& is_done) const;
  void run_attention(const Phase& phase, const AttentionPlan& plan, int chunk, int thread);
  void run_attention_head(const Phase& phase, const AttentionItem& item, int head, int thread, const KvBlocks& next,
                          int32_t num_next_keys);
  KvBlocks kv_blocks(const AttentionShape& shape, int layer, const AttentionItem& item, int head) const;
  void embed(const Embedding& embedding, const Buffer& out, int row);
  RowsView view(int buffer) const { return {buffers_[buffer].data, buffers_[buffer].ld, buffers_[buffer].width}; }
  Activations activations(int buffer) const;
  int add_time(const std::string& label);

  const Kernels& kernels_;
  ThreadPool& pool_;
  const int block_size_, num_kv_blocks_;
  std::vector<Buffer> buffers_;
  std::vector<KvPool> groups_;
  std::vector<PackedMatrix> matrices_;
  Arena weights_, row_memory_;
  std::vector<Embedding> embeddings_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Turns> turns_;
  std::vector<Phase> phases_;
  std::vector<AttentionShape> attention_shapes_;
  std::vector<Cut> cuts_;
  int logits_buffer_ = 0;
  int64_t packed_bytes_ = 0;
  int64_t num_rows_reserved_ = 0;

  Kept kept_;
  Slice slice_ = {};  // of this step; of no phase and no rows where there is none

  // This pass.
  const ForwardBatch* batch_ = nullptr;
  int token0_ = 0, out0_ = 0;
  std::vector<Segment> segments_;
  std::vector<int32_t> segment_of_row_;
  std::vector<int32_t> num_chunks_;
  std::vector<Memory<float>> scratch_;  // per thread
  int64_t scratch_floats_ = 0;
  Memory<float> partials_;
  int64_t partials_floats_ = 0;
  std::unique_ptr<std::atomic<int32_t>[]> splits_done_;  // all zero between phases
  int num_splits_done_ = 0;

  std::shared_ptr<float[]> logits_;
  int64_t logits_floats_ = 0;
  Work work_;
  bool is_profiling_ = false;
  std::vector<PhaseTime> times_;
  std::vector<int64_t> end_ns_;
};

}  // namespace ropeway
