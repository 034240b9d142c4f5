#include "executable.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "dequantize.h"

namespace ropeway {
namespace {

constexpr int kMaxPassTokens = 256;  // a longer step runs as several passes, so that activations stay in the caches
constexpr int kMaxProductRows = 256;
constexpr int kMinQueryPairs = 24, kMaxQueryPairs = 144;  // (row, head) pairs that share a widened tile of keys
constexpr int kMaxQueryFloats = kMaxQueryPairs * 64;
constexpr int kMaxPhasesAhead = 2;               // between a phase that keeps one thread busy and the next product
constexpr int64_t kMaxAheadBytes = 64 << 10;     // of a product's weights, fetched while it is waited for
constexpr int64_t kLeastLogitsKept = 1 << 24;    // floats of logits that a later pass may need again
constexpr int64_t kMaxPartialsFloats = 1 << 24;  // of states of attention that wait to be merged
constexpr int kMaxFetchBytes = 256 << 10;        // of keys and values of one head, fetched while another is worked on

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::string text;
  const auto append = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>)
      text += std::to_string(part);
    else
      text += part;
  };
  (append(parts), ...);
  throw std::invalid_argument(text);
}

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
int32_t ceil_div(int64_t n, int64_t unit) { return static_cast<int32_t>((n + unit - 1) / unit); }

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

KvPool::KvPool(int num_layers, int num_kv_heads, int head_dim, int block_size, int num_blocks)
    : num_layers(num_layers),
      num_kv_heads(num_kv_heads),
      head_dim(head_dim),
      head_stride((int64_t{head_dim} + round_up(head_dim, kLanes)) * block_size),
      block_stride(int64_t{num_layers} * num_kv_heads * head_stride),
      memory(static_cast<size_t>(num_blocks) * block_stride * sizeof(uint16_t)) {}

Executable::Executable(const Kernels& kernels, ThreadPool& pool, int block_size, int num_kv_blocks)
    : kernels_(kernels), pool_(pool), block_size_(block_size), num_kv_blocks_(num_kv_blocks) {
  if (block_size < 1 || block_size % kLanes) refuse("block_size must be a multiple of ", kLanes, ", not ", block_size);
  if (num_kv_blocks < 1) refuse("num_kv_blocks must be at least 1, not ", num_kv_blocks);
  scratch_.resize(pool.num_threads());
}

int Executable::add_buffer(int width) {
  if (width < 1) refuse("a buffer of width ", width);
  Buffer& buffer = buffers_.emplace_back();
  buffer.width = width;
  // Rows lie an odd number of cache lines apart. An even number puts the same column of many rows in few sets of the
  // caches: products of 64 to 256 rows take 1.05 times as long.
  buffer.ld = round_up(width, 2 * kLanes) | 2 * kLanes;
  return static_cast<int>(buffers_.size()) - 1;
}

int Executable::add_cache_group(int num_layers, int num_kv_heads, int head_dim) {
  if (num_layers < 1 || num_kv_heads < 1 || head_dim < 1) refuse("a cache group of no size");
  groups_.emplace_back(num_layers, num_kv_heads, head_dim, block_size_, num_kv_blocks_);
  return static_cast<int>(groups_.size()) - 1;
}

int Executable::add_matrix(TensorType type, int n, int k, std::span<const uint8_t> data) {
  if (n < 1 || k < 1 || data.size() != row_bytes(type, k) * n)
    refuse("a matrix of ", n, " x ", k, " in ", data.size(), " bytes");
  PackedMatrix& matrix = matrices_.emplace_back(packed_shape(type, n, k));
  const int64_t num_bytes = static_cast<int64_t>(ropeway::packed_bytes(matrix));
  uint8_t* const packed = weights_.allocate<uint8_t>(num_bytes);
  matrix.data = packed;
  packed_bytes_ += num_bytes;
  const TensorRows rows{type, n, data.data()};
  const int columns = std::max(1, (1 << 16) / k / kTileColumns) * kTileColumns;
  pool_.parallel_for(ceil_div(n, columns), [&](int chunk, int) {
    pack_columns(matrix, {&rows, 1}, chunk * columns, std::min(n, (chunk + 1) * columns), packed);
  });
  return static_cast<int>(matrices_.size()) - 1;
}

int Executable::add_embedding(TensorType type, int n, int k, std::span<const uint8_t> data) {
  if (n < 1 || k < 1 || data.size() != row_bytes(type, k) * n)
    refuse("an embedding of ", n, " x ", k, " in ", data.size(), " bytes");
  embeddings_.push_back({.n = n, .k = k, .type = type, .data = data.data()});
  return static_cast<int>(embeddings_.size()) - 1;
}

int Executable::add_tied_embedding(int matrix) {
  const PackedMatrix& packed = matrices_.at(matrix);
  embeddings_.push_back({.n = packed.n, .k = packed.k, .matrix = matrix});
  return static_cast<int>(embeddings_.size()) - 1;
}

int Executable::add_vector(std::span<const float> values) {
  vectors_.emplace_back(values.begin(), values.end());
  return static_cast<int>(vectors_.size()) - 1;
}

int Executable::add_turns(std::span<const double> frequencies) {
  turns_.push_back({{frequencies.begin(), frequencies.end()}});
  return static_cast<int>(turns_.size()) - 1;
}

void Executable::check_buffer(int buffer, int width, const char* what) const {
  const int found = buffers_.at(buffer).width;
  if (found != width) refuse(what, ": a buffer of width ", found, " where ", width, " is needed");
}

void Executable::add_rows_phase(std::string label, bool is_selected, std::vector<RowOp> ops) {
  for (const RowOp& op : ops) {
    const int width = buffers_.at(op.out).width;
    switch (op.kind) {
      case RowOpKind::Turns:
        (void)turns_.at(op.table);
        break;
      case RowOpKind::Embed:
        check_buffer(op.out, embeddings_.at(op.table).k, "embed");
        break;
      case RowOpKind::Norm:
      case RowOpKind::Bias:
        check_buffer(op.a, width, "norm or bias");
        check_buffer(op.out, static_cast<int>(vectors_.at(op.table).size()), "norm or bias");
        break;
      case RowOpKind::Quantize:
        if (width % kGroup) refuse("a width of ", width, " is not quantised in groups of ", kGroup);
        break;
      case RowOpKind::Rope:
        if (op.rope_shape.head_dim < 1 || width % op.rope_shape.head_dim ||
            op.rope_shape.rotary_dim > op.rope_shape.head_dim ||
            op.rope_shape.rotary_dim != 2 * static_cast<int>(turns_.at(op.table).frequencies.size()))
          refuse("rope: ", op.rope_shape.rotary_dim, " of ", op.rope_shape.head_dim, " entries in a buffer of width ",
                 width);
        break;
      case RowOpKind::KvWrite: {
        const KvPool& group = groups_.at(op.table);
        check_buffer(op.a, group.num_kv_heads * group.head_dim, "keys");
        check_buffer(op.b, group.num_kv_heads * group.head_dim, "values");
        if (op.layer < 0 || op.layer >= group.num_layers) refuse("layer ", op.layer, " of ", group.num_layers);
        break;
      }
      case RowOpKind::SiluGate:
      case RowOpKind::Add:
        check_buffer(op.a, width, "add or gate");
        check_buffer(op.b, width, "add or gate");
        break;
      case RowOpKind::SelectRows:
        check_buffer(op.a, width, "select_rows");
        break;
    }
    if (is_selected && (op.kind == RowOpKind::Embed || op.kind == RowOpKind::Rope || op.kind == RowOpKind::KvWrite))
      refuse("an op on tokens after select_rows");
  }
  Phase& phase = phases_.emplace_back();
  phase.time = add_time(label);
  phase.label = std::move(label);
  phase.is_selected = is_selected;
  phase.ops = std::move(ops);
}

void Executable::add_product_phase(std::string label, bool is_selected, int x, std::vector<Product> products) {
  for (const Product& product : products) {
    const PackedMatrix& w = matrices_.at(product.matrix);
    check_buffer(x, w.k, "linear");
    check_buffer(product.out, w.n, "linear");
    if (product.out == x) refuse("a linear writes the buffer that it reads");
    buffers_[x].is_coded |= w.form == Form::U4;
    buffers_[x].is_wide |= w.form == Form::S8;
  }
  Phase& phase = phases_.emplace_back();
  phase.time = add_time(label);
  phase.label = std::move(label);
  phase.is_selected = is_selected;
  phase.x = x;
  phase.first_tile.push_back(0);
  for (const Product& product : products)
    phase.first_tile.push_back(phase.first_tile.back() + matrices_[product.matrix].n_padded / kTileColumns);
  phase.products = std::move(products);
}

void Executable::add_attention_phase(std::string label, AttentionOp op) {
  const KvPool& group = groups_.at(op.group);
  if (op.num_heads < 1 || op.num_heads % group.num_kv_heads || op.layer < 0 || op.layer >= group.num_layers)
    refuse("attention: ", op.num_heads, " heads over ", group.num_kv_heads, ", layer ", op.layer, " of ",
           group.num_layers);
  check_buffer(op.q, op.num_heads * group.head_dim, "attention");
  check_buffer(op.out, op.num_heads * group.head_dim, "attention");
  const int query_heads = op.num_heads / group.num_kv_heads;
  size_t shape = 0;
  while (shape < attention_shapes_.size() &&
         !(attention_shapes_[shape].group == op.group && attention_shapes_[shape].query_heads == query_heads))
    ++shape;
  if (shape == attention_shapes_.size())
    attention_shapes_.push_back({op.group, group.num_kv_heads, query_heads, group.head_dim});
  Phase& phase = phases_.emplace_back();
  phase.time = add_time(label);
  phase.label = std::move(label);
  phase.is_attention = true;
  phase.attention = op;
  phase.attention_shape = static_cast<int>(shape);
}

void Executable::set_logits(int buffer) {
  (void)buffers_.at(buffer);
  logits_buffer_ = buffer;
}

void Executable::add_cut(std::vector<int> buffers) {
  for (const int buffer : buffers) (void)buffers_.at(buffer);
  if (!cuts_.empty() && cuts_.back().phase == static_cast<int>(phases_.size())) refuse("two cuts at one phase");
  cuts_.push_back({static_cast<int>(phases_.size()), std::move(buffers)});
}

int64_t Executable::kv_bytes() const {
  int64_t total = 0;
  for (const KvPool& group : groups_) total += static_cast<int64_t>(group.memory.num_bytes());
  return total;
}

void Executable::copy_blocks(int group, std::span<const int32_t> source_ids, std::span<const int32_t> destination_ids) {
  if (group < 0 || group >= static_cast<int>(groups_.size())) refuse("cache group ", group, " of ", groups_.size());
  if (source_ids.size() != destination_ids.size())
    refuse(source_ids.size(), " blocks to copy to ", destination_ids.size());
  for (const std::span<const int32_t>& ids : {source_ids, destination_ids})
    for (const int32_t id : ids)
      if (id < 0 || id >= num_kv_blocks_) refuse("block ", id, " of a pool of ", num_kv_blocks_);
  const KvPool& pool = groups_[group];
  uint16_t* const blocks = pool.layer(0);
  // A layer is one chunk, so that each value is copied in the order of the pairs: a source may be an earlier target.
  const int64_t layer_stride = pool.num_kv_heads * pool.head_stride;
  pool_.parallel_for(pool.num_layers, [&](int layer, int) {
    for (size_t i = 0; i < source_ids.size(); ++i)
      if (source_ids[i] != destination_ids[i])
        std::memcpy(blocks + destination_ids[i] * pool.block_stride + layer * layer_stride,
                    blocks + source_ids[i] * pool.block_stride + layer * layer_stride, layer_stride * sizeof(uint16_t));
  });
}

int Executable::add_time(const std::string& label) {
  for (size_t i = 0; i < times_.size(); ++i)
    if (times_[i].label == label) return static_cast<int>(i);
  times_.push_back({label});
  return static_cast<int>(times_.size()) - 1;
}

void Executable::set_profiling(bool is_on) {
  is_profiling_ = is_on;
  for (PhaseTime& time : times_) time.num_runs = time.total_ns = 0;
}

void Executable::check_batch(const ForwardBatch& batch) const {
  const int64_t num_tokens = static_cast<int64_t>(batch.token_ids.size()),
                num_sequences = static_cast<int64_t>(batch.kv_lens.size());
  if (num_tokens > INT32_MAX / 2) refuse("a batch of ", num_tokens, " tokens");
  if (static_cast<int64_t>(batch.positions.size()) != num_tokens)
    refuse(batch.positions.size(), " positions for ", num_tokens, " tokens");
  if (static_cast<int64_t>(batch.query_indptr.size()) != num_sequences + 1 || batch.query_indptr[0] != 0 ||
      batch.query_indptr[num_sequences] != num_tokens)
    refuse("query_indptr does not run from 0 to ", num_tokens, " over ", num_sequences, " sequences");
  if (batch.tables.size() != groups_.size())
    refuse(batch.tables.size(), " block tables for ", groups_.size(), " cache groups");
  for (const Embedding& embedding : embeddings_)
    for (const int32_t id : batch.token_ids)
      if (id < 0 || id >= embedding.n) refuse("token id ", id, " of a vocabulary of ", embedding.n);
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int32_t first = batch.query_indptr[s], end = batch.query_indptr[s + 1];
    if (end < first || end > num_tokens || first < 0) refuse("query_indptr falls at sequence ", s);
    const int64_t kv_len = batch.kv_lens[s];
    if (kv_len < end - first) refuse("sequence ", s, " has ", end - first, " tokens but kv_len ", kv_len);
    for (int32_t t = first; t < end; ++t)
      if (batch.positions[t] != kv_len - (end - t))
        refuse("token ", t, " is at position ", batch.positions[t], ", not ", kv_len - (end - t));
    const int64_t num_blocks = ceil_div(kv_len, block_size_);
    for (const BlockTableView& table : batch.tables) {
      if (static_cast<int64_t>(table.offsets.size()) != num_sequences)
        refuse(table.offsets.size(), " block tables for ", num_sequences, " sequences");
      const int64_t offset = table.offsets[s], num_ids = static_cast<int64_t>(table.block_ids.size());
      if (offset < 0 || offset > num_ids || num_blocks > num_ids - offset)
        refuse("sequence ", s, " has ", num_blocks, " blocks at ", offset, " of a table of ", num_ids);
      for (int64_t i = offset; i < offset + num_blocks; ++i)
        if (table.block_ids[i] < 0 || table.block_ids[i] >= num_kv_blocks_)
          refuse("sequence ", s, " has block ", table.block_ids[i], " of a pool of ", num_kv_blocks_);
    }
  }
  for (size_t r = 0; r < batch.out_rows.size(); ++r)
    if (batch.out_rows[r] < 0 || batch.out_rows[r] >= num_tokens || (r && batch.out_rows[r] <= batch.out_rows[r - 1]))
      refuse("out_rows do not ascend within ", num_tokens, " tokens");
  if (batch.layer_slice) check_slice(batch);
}

void Executable::check_slice(const ForwardBatch& batch) const {
  const auto [index, count] = *batch.layer_slice;
  if (count < 1 || count > num_layers() || index < 0 || index >= count)
    refuse("slice ", index, " of ", count, ", of ", num_layers(), " layers");
  if (batch.kv_lens.empty()) refuse("a slice of no sequence");
  const int token = batch.query_indptr[batch.kv_lens.size() - 1];
  const int num_rows = static_cast<int>(batch.token_ids.size()) - token;
  if (num_rows < 1) refuse("a slice of no tokens");
  if (index < count - 1 && !batch.out_rows.empty() && batch.out_rows.back() >= token)
    refuse("logits of a token that has not passed every layer");
  if (index > 0 && (kept_.next != index || kept_.count != count || kept_.num_rows != num_rows ||
                    kept_.position != batch.positions[token]))
    refuse("slice ", index, " of ", count, " for ", num_rows, " tokens from position ", batch.positions[token],
           " does not follow the last one");
}

Executable::Slice Executable::find_slice(const ForwardBatch& batch) const {
  const int num_tokens = static_cast<int>(batch.token_ids.size()), num_phases = static_cast<int>(phases_.size());
  if (!batch.layer_slice) return {num_tokens, 0, 0, nullptr, nullptr};
  const int64_t index = batch.layer_slice->index, count = batch.layer_slice->count;
  const auto cut = [&](int64_t i) { return i == 0 || i == count ? nullptr : &cuts_[i * num_layers() / count - 1]; };
  const Cut *const entry = cut(index), *const exit = cut(index + 1);
  return {batch.query_indptr[batch.kv_lens.size() - 1], entry ? entry->phase : 0, exit ? exit->phase : num_phases,
          entry, exit};
}

void Executable::end_slice(const ForwardBatch& batch) {
  if (!batch.layer_slice) return;
  const auto [index, count] = *batch.layer_slice;
  kept_.next = index + 1 < count ? index + 1 : 0;
  kept_.count = count;
  kept_.num_rows = static_cast<int>(batch.token_ids.size()) - slice_.token;
  kept_.position = batch.positions[slice_.token];
}

int64_t Executable::kept_floats() const {
  int64_t most = 0, turns_floats = 0;
  for (const Cut& cut : cuts_) {
    int64_t floats = 0;
    for (const int buffer : cut.buffers) floats += buffers_[buffer].width;
    most = std::max(most, floats);
  }
  for (const Turns& turns : turns_) turns_floats += 2 * static_cast<int64_t>(turns.frequencies.size());
  return most + turns_floats;
}

// copy(kept, row, n): n floats of what is kept of a row of this pass, and where they are in it.
template <class Copy>
void Executable::each_kept(const Cut& cut, int num_full, int num_tokens, Copy&& copy) {
  const int64_t stride = kept_floats();
  for (int row = num_full; row < num_tokens; ++row) {
    float* kept = kept_.floats.data() + (token0_ + row - slice_.token) * stride;
    const auto next = [&](float* values, int64_t num_floats) {
      copy(kept, values, num_floats);
      kept += num_floats;
    };
    for (const int buffer : cut.buffers)
      next(buffers_[buffer].data + row * buffers_[buffer].ld, buffers_[buffer].width);
    for (const Turns& turns : turns_) {
      const int64_t num_floats = 2 * static_cast<int64_t>(turns.frequencies.size());
      next(turns.rows + row * num_floats, num_floats);
    }
  }
}

void Executable::reserve_rows(int64_t num_rows) {
  if (num_rows <= num_rows_reserved_) return;
  int64_t capacity = 8;
  while (capacity < num_rows) capacity *= 2;
  num_rows_reserved_ = 0;  // should an allocation fail, nothing that is left is used
  row_memory_ = Arena{};
  for (size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& buffer = buffers_[i];
    if (static_cast<int>(i) != logits_buffer_) buffer.data = row_memory_.allocate<float>(capacity * buffer.ld);
    if (buffer.is_coded) {
      buffer.coded = row_memory_.allocate<CodedGroup>(capacity * (buffer.width / kGroup));
      buffer.scales = row_memory_.allocate<float>(capacity);
    }
    if (buffer.is_wide) buffer.wide = row_memory_.allocate<WideGroup>(capacity * (buffer.width / kGroup));
  }
  for (Turns& turns : turns_)
    turns.rows = row_memory_.allocate<float>(capacity * 2 * static_cast<int64_t>(turns.frequencies.size()));
  num_rows_reserved_ = capacity;
}

std::shared_ptr<float[]> Executable::forward(const ForwardBatch& batch) {
  check_batch(batch);
  const int num_tokens = static_cast<int>(batch.token_ids.size()), num_out = static_cast<int>(batch.out_rows.size());
  Buffer& logits = buffers_.at(logits_buffer_);
  logits.ld = logits.width;
  const int64_t num_floats = std::max<int64_t>(1, num_out) * logits.width;
  // What one step of a prompt's log-probabilities took is not kept for the life of a server.
  if (num_floats > logits_floats_ || logits_floats_ > 4 * num_floats + kLeastLogitsKept) {
    logits_ = std::shared_ptr<float[]>(static_cast<float*>(allocate_bytes(num_floats * sizeof(float))), FreeMemory{});
    logits_floats_ = num_floats;
  }
  reserve_rows(std::min(num_tokens, kMaxPassTokens));
  slice_ = find_slice(batch);
  if (slice_.exit)
    kept_.floats.resize(
        std::max(kept_.floats.size(), (num_tokens - slice_.token) * static_cast<size_t>(kept_floats())));
  for (int token0 = 0, out0 = 0; token0 < num_tokens;) {
    const int token1 = std::min(num_tokens, token0 + kMaxPassTokens);
    int out1 = out0;
    while (out1 < num_out && batch.out_rows[out1] < token1) ++out1;
    logits.data = logits_.get() + int64_t{out0} * logits.width;
    run_pass(batch, token0, token1, out0, out1);
    token0 = token1, out0 = out1;
  }
  end_slice(batch);
  return logits_;
}

void Executable::run_pass(const ForwardBatch& batch, int token0, int token1, int out0, int out1) {
  batch_ = &batch, token0_ = token0, out0_ = out0;
  find_segments(batch, token0, token1);
  const int num_tokens = token1 - token0, num_selected = out1 - out0;
  const int num_full = std::clamp(slice_.token - token0, 0, num_tokens);  // rows that run through every phase
  for (AttentionShape& shape : attention_shapes_) {
    plan_attention(shape, shape.full, num_full);
    if (slice_.phase_begin < slice_.phase_end) plan_attention(shape, shape.sliced, num_tokens);
  }
  const int num_phases = static_cast<int>(phases_.size());
  num_chunks_.clear();
  for (int i = 0; i < num_phases; ++i)
    num_chunks_.push_back(plan_phase(i, num_rows(i, num_tokens, num_full, num_selected)));
  count_work(num_tokens, num_full, num_selected);
  if (slice_.entry)
    each_kept(*slice_.entry, num_full, num_tokens,
              [](const float* kept, float* row, int64_t n) { std::copy_n(kept, n, row); });
  int64_t start_ns = 0;
  if (is_profiling_) {
    end_ns_.resize(phases_.size());
    start_ns = now_ns();
  }
  pool_.run(
      num_chunks_.data(), num_phases,
      [&](int index, int chunk, int thread) {
        const Phase& phase = phases_[index];
        const int rows = num_rows(index, num_tokens, num_full, num_selected);
        if (phase.is_attention) {
          run_attention(phase, attention_plan(index), chunk, thread);
        } else if (!phase.products.empty()) {
          run_product(phase, chunk, rows);
        } else {
          run_rows(phase, chunk * phase.rows_per_chunk, std::min(rows, (chunk + 1) * phase.rows_per_chunk));
        }
      },
      [&](int index, int thread, const auto& is_done) { fetch_next_product(index, thread, is_done); },
      is_profiling_ ? end_ns_.data() : nullptr);
  if (slice_.exit)
    each_kept(*slice_.exit, num_full, num_tokens,
              [](float* kept, const float* row, int64_t n) { std::copy_n(row, n, kept); });
  if (is_profiling_) {
    for (int i = 0; i < num_phases; ++i) {
      PhaseTime& time = times_[phases_[i].time];
      time.num_runs += 1;
      time.total_ns += end_ns_[i] - (i ? end_ns_[i - 1] : start_ns);
    }
  }
}

void Executable::count_work(int num_tokens, int num_full, int num_selected) {
  struct {
    int64_t num_pairs, num_keys;  // (query, key) pairs that attend; keys read, once per sequence
  } full = {}, sliced = {};
  for (const Segment& segment : segments_) {
    const int64_t rows = segment.num_rows, start = segment.start;
    sliced.num_pairs += rows * start + rows * (rows + 1) / 2;
    sliced.num_keys += start + rows;
    if (segment.row0 < num_full) full = sliced;
  }
  for (int i = 0; i < static_cast<int>(phases_.size()); ++i) {
    const Phase& phase = phases_[i];
    if (phase.is_attention) {
      const KvPool& pool = groups_[phase.attention.group];
      const auto& [num_pairs, num_keys] = slice_.contains(i) ? sliced : full;
      work_.f32_multiply_adds += 2 * num_pairs * phase.attention.num_heads * pool.head_dim;
      work_.bytes_read += 2 * num_keys * pool.num_kv_heads * pool.head_dim * int64_t{sizeof(uint16_t)};
    }
    const int64_t rows = num_rows(i, num_tokens, num_full, num_selected);
    for (const Product& product : phase.products) {
      const PackedMatrix& w = matrices_[product.matrix];
      const bool is_quantised = w.form == Form::U4 || w.form == Form::S8;
      (is_quantised ? work_.int8_multiply_adds : work_.f32_multiply_adds) += rows * w.n * w.k;
      if (rows > 0) work_.bytes_read += static_cast<int64_t>(ropeway::packed_bytes(w));
    }
  }
}

int Executable::num_rows(int phase, int num_tokens, int num_full, int num_selected) const {
  if (phases_[phase].is_selected) return num_selected;
  return slice_.contains(phase) ? num_tokens : num_full;
}

void Executable::find_segments(const ForwardBatch& batch, int token0, int token1) {
  segments_.clear();
  segment_of_row_.resize(token1 - token0);
  const auto& indptr = batch.query_indptr;
  // The sequence that holds token0 is the last one that begins at or before it.
  int s = static_cast<int>(std::upper_bound(indptr.begin(), indptr.end(), token0) - indptr.begin()) - 1;
  for (; s < static_cast<int>(batch.kv_lens.size()) && indptr[s] < token1; ++s) {
    const int first = std::max(indptr[s], token0), end = std::min(indptr[s + 1], token1);
    if (first >= end) continue;
    for (int t = first; t < end; ++t) segment_of_row_[t - token0] = static_cast<int32_t>(segments_.size());
    segments_.push_back({s, first - token0, end - first, batch.positions[first]});
  }
}

// Plans the segments that begin before row `num_tokens`, which are whole.
void Executable::plan_attention(const AttentionShape& shape, AttentionPlan& plan, int num_tokens) {
  // Many rows share a tile well; too many leave a thread without work at the end, unless their keys are shared out.
  const int max_pairs = std::min(kMaxQueryPairs, kMaxQueryFloats / shape.head_dim);
  const int num_pairs = num_tokens * shape.query_heads;
  const int fair_pairs = ceil_div(int64_t{num_pairs} * shape.num_kv_heads, 4 * pool_.num_threads());
  const int most_rows = std::max(1, max_pairs / shape.query_heads);
  const int fair_rows =
      std::max(1, std::clamp(fair_pairs, std::min(kMinQueryPairs, max_pairs), max_pairs) / shape.query_heads);
  plan.items.clear();
  for (int i = 0; i < static_cast<int>(segments_.size()) && segments_[i].row0 < num_tokens; ++i) {
    const Segment& segment = segments_[i];
    const int num_parts = ceil_div(int64_t{segment.start} + segment.num_rows, kKeySplit) * shape.num_kv_heads;
    const int max_rows = num_parts >= 4 * pool_.num_threads() ? most_rows : fair_rows;
    for (int row = 0, num_rows; row < segment.num_rows; row += num_rows) {
      // Rows of an item end in the same split: none of them merges one of which it sees no keys.
      num_rows = std::min({max_rows, segment.num_rows - row, kKeySplit - (segment.start + row) % kKeySplit});
      const int num_splits = ceil_div(int64_t{segment.start} + row + num_rows, kKeySplit);
      plan.items.push_back({i, row, num_rows, 0, num_splits, num_splits, 0, 0, false});
    }
  }
  share_attention(shape, plan);
  const int64_t floats = kernels_.attention_scratch_floats(most_rows, shape.query_heads, shape.head_dim);
  if (floats > scratch_floats_) {
    for (Memory<float>& scratch : scratch_) scratch = allocate<float>(floats);
    scratch_floats_ = floats;
  }
}

// Cuts items into chunks of several heads, one head, or (rows with a long past) one split of one head, so that no chunk
// has more than a fair part of the work, as far as the states of splits fit their bound. The longest come first: they
// need it most, and the last to be claimed should be short.
void Executable::share_attention(const AttentionShape& shape, AttentionPlan& plan) {
  const auto num_keys = [&](const AttentionItem& item) {  // of a head, over the rows; about
    return int64_t{item.num_rows} * (segments_[item.segment].start + item.row + item.num_rows);
  };
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [&](const AttentionItem& a, const AttentionItem& b) { return num_keys(a) > num_keys(b); });
  int64_t fair_keys = 0;
  for (const AttentionItem& item : plan.items) fair_keys += num_keys(item) * shape.num_kv_heads;
  if (pool_.num_threads() > 1) fair_keys = std::max<int64_t>(1, fair_keys / (8 * pool_.num_threads()));
  const int64_t unit_floats = int64_t{shape.query_heads} * kernels_.attention_state_floats(shape.head_dim);
  const std::vector<AttentionItem> items = std::move(plan.items);
  plan.items.clear();
  plan.chunks.clear();
  int64_t partials = 0;
  int32_t counter = 0;
  for (const AttentionItem& item : items) {
    const int64_t item_partials = unit_floats * item.num_rows * item.num_splits * shape.num_kv_heads;
    const bool is_shared =
        num_keys(item) > fair_keys && item.num_splits > 1 && partials + item_partials <= kMaxPartialsFloats;
    for (int split = 0; split < (is_shared ? item.num_splits : 1); ++split) {
      const int32_t index = static_cast<int32_t>(plan.items.size());
      plan.items.push_back(item);
      if (is_shared) {
        plan.items.back().split_begin = split;
        plan.items.back().split_end = split + 1;
        plan.items.back().partials = partials;
        plan.items.back().counter = counter;
        plan.items.back().is_shared = true;
      }
      const int32_t num_heads =
          static_cast<int32_t>(std::clamp<int64_t>(fair_keys / num_keys(item), 1, shape.num_kv_heads));
      for (int32_t head = 0; head < shape.num_kv_heads; head += num_heads)
        plan.chunks.push_back({index, head, std::min(head + num_heads, shape.num_kv_heads)});
    }
    if (is_shared) {
      partials += item_partials;
      counter += shape.num_kv_heads;
    }
  }
  if (partials > partials_floats_) {
    partials_ = allocate<float>(partials);
    partials_floats_ = partials;
  }
  if (counter > num_splits_done_) {
    splits_done_ = std::make_unique<std::atomic<int32_t>[]>(counter);
    num_splits_done_ = counter;
  }
}

const Executable::AttentionPlan& Executable::attention_plan(int phase) const {
  const AttentionShape& shape = attention_shapes_[phases_[phase].attention_shape];
  return slice_.contains(phase) ? shape.sliced : shape.full;
}

int32_t Executable::plan_phase(int index, int num_rows) {
  Phase& phase = phases_[index];
  if (num_rows == 0) return 0;
  if (phase.is_attention) return static_cast<int32_t>(attention_plan(index).chunks.size());
  if (phase.products.empty()) {
    phase.rows_per_chunk = std::clamp(ceil_div(num_rows, 4 * pool_.num_threads()), 1, 16);
    return ceil_div(num_rows, phase.rows_per_chunk);
  }
  const double tile_multiply_adds =
      double{kTileColumns} * buffers_[phase.x].width * std::min(num_rows, kMaxProductRows);
  int32_t unit = 1;
  for (const Product& product : phase.products) unit = std::max(unit, tiles_together(matrices_[product.matrix].form));
  phase.tile_chunks = cut_tiles(phase.first_tile.back(), tile_multiply_adds, pool_.num_threads(), unit);
  return phase.tile_chunks.num_chunks * ceil_div(num_rows, kMaxProductRows);
}

Activations Executable::activations(int index) const {
  const Buffer& b = buffers_[index];
  return {b.data, b.ld, b.width, b.coded, b.scales, b.wide};
}

void Executable::run_product(const Phase& phase, int chunk, int num_rows) {
  const TileChunks& chunks = phase.tile_chunks;
  const int row0 = chunk / chunks.num_chunks * kMaxProductRows, row1 = std::min(num_rows, row0 + kMaxProductRows);
  const int32_t begin = chunks.begin(chunk % chunks.num_chunks), end = chunks.begin(chunk % chunks.num_chunks + 1);
  for (size_t i = 0; i < phase.products.size(); ++i) {
    const int32_t tile0 = std::max(begin, phase.first_tile[i]), tile1 = std::min(end, phase.first_tile[i + 1]);
    if (tile0 >= tile1) continue;
    const PackedMatrix& w = matrices_[phase.products[i].matrix];
    const Buffer& out = buffers_[phase.products[i].out];
    kernels_.gemm(w, activations(phase.x), row0, row1, (tile0 - phase.first_tile[i]) * kTileColumns,
                  std::min(w.n, (tile1 - phase.first_tile[i]) * kTileColumns), out.data, out.ld);
  }
}

// A thread that waits for the end of a phase fetches the weights that it will multiply by next: with few rows the
// phases between products keep one thread busy, and the memory idle. A decode of one sequence takes 0.95 of the time
// so.
template <class IsDone>
void Executable::fetch_next_product(int index, int thread, const IsDone& is_done) const {
  const int end = std::min(static_cast<int>(phases_.size()), index + 1 + kMaxPhasesAhead);
  for (int i = index + 1; i < end; ++i) {
    const Phase& phase = phases_[i];
    if (phase.products.empty() || num_chunks_[i] == 0) continue;
    const TileChunks& chunks = phase.tile_chunks;
    const int32_t chunk = std::min(thread, chunks.num_chunks - 1), begin = chunks.begin(chunk);
    size_t product = 0;
    while (begin >= phase.first_tile[product + 1]) ++product;
    const PackedMatrix& w = matrices_[phase.products[product].matrix];
    const int64_t tile_bytes = static_cast<int64_t>(ropeway::packed_bytes(w)) / (w.n_padded / kTileColumns);
    const int32_t tiles = std::min(chunks.begin(chunk + 1), phase.first_tile[product + 1]) - begin;
    const uint8_t* from = w.data + (begin - phase.first_tile[product]) * tile_bytes;
    const int64_t num_bytes = std::min(kMaxAheadBytes, tiles * tile_bytes);
    for (int64_t at = 0; at < num_bytes; at += 64) {
      if (at % 2048 == 0 && is_done()) return;
      __builtin_prefetch(from + at, 0, 2);
    }
    return;
  }
}

KvBlocks Executable::kv_blocks(const AttentionShape& shape, int layer, const AttentionItem& item, int head) const {
  const KvPool& pool = groups_[shape.group];
  const BlockTableView& table = batch_->tables[shape.group];
  return {pool.layer(layer) + head * pool.head_stride,
          table.block_ids.data() + table.offsets[segments_[item.segment].sequence]};
}

void Executable::run_attention(const Phase& phase, const AttentionPlan& plan, int chunk, int thread) {
  const AttentionShape& shape = attention_shapes_[phase.attention_shape];
  const AttentionChunk& own = plan.chunks[chunk];
  for (int head = own.head_begin; head < own.head_end; ++head) {
    // What this thread reads next, as far as can be known: another head, or the chunk it claims when all go on alike,
    // which chunks of one head do not.
    AttentionChunk following{own.item, head + 1, own.head_end};
    if (head + 1 == own.head_end) {
      const int next_chunk = chunk + pool_.num_threads();
      const bool is_known =
          own.head_end - own.head_begin == shape.num_kv_heads && next_chunk < static_cast<int>(plan.chunks.size());
      following = is_known ? plan.chunks[next_chunk] : AttentionChunk{};
    }
    KvBlocks next{};
    int32_t num_next_keys = 0;
    if (following.head_begin < following.head_end) {
      const AttentionItem& found = plan.items[following.item];
      next = kv_blocks(shape, phase.attention.layer, found, following.head_begin);
      num_next_keys = segments_[found.segment].start + found.row + found.num_rows;
      if (num_next_keys > kMaxFetchBytes / (4 * shape.head_dim)) num_next_keys = 0;
    }
    run_attention_head(phase, plan.items[own.item], head, thread, next, num_next_keys);
  }
}

void Executable::run_attention_head(const Phase& phase, const AttentionItem& item, int head, int thread,
                                    const KvBlocks& next, int32_t num_next_keys) {
  const AttentionShape& shape = attention_shapes_[phase.attention_shape];
  const Segment& segment = segments_[item.segment];
  const Buffer &q = buffers_[phase.attention.q], &out = buffers_[phase.attention.out];
  const int64_t row = segment.row0 + item.row, column = int64_t{head} * shape.query_heads * shape.head_dim;
  const AttentionTask task{.blocks = kv_blocks(shape, phase.attention.layer, item, head),
                           .block_stride = groups_[shape.group].block_stride,
                           .block_size = block_size_,
                           .head_dim = shape.head_dim,
                           .group = shape.query_heads,
                           .start = segment.start + item.row,
                           .num_rows = item.num_rows,
                           .split_begin = item.split_begin,
                           .split_end = item.split_end,
                           .scale = phase.attention.scale,
                           .q = q.data + row * q.ld + column,
                           .ld_q = q.ld,
                           .out = out.data + row * out.ld + column,
                           .ld_out = out.ld,
                           .next = next,
                           .num_next_keys = item.is_shared ? 0 : num_next_keys};
  if (!item.is_shared) return kernels_.attention(task, nullptr, scratch_[thread].get());
  const int64_t head_floats =
      int64_t{item.num_splits} * item.num_rows * shape.query_heads * kernels_.attention_state_floats(shape.head_dim);
  float* partials = partials_.get() + item.partials + head * head_floats;
  kernels_.attention(task, partials, scratch_[thread].get());
  std::atomic<int32_t>& done = splits_done_[item.counter + head];
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item.num_splits) return;
  done.store(0, std::memory_order_relaxed);
  AttentionTask merged = task;
  merged.split_begin = 0;
  merged.split_end = item.num_splits;
  kernels_.attention_merge(merged, partials);
}

void Executable::embed(const Embedding& embedding, const Buffer& out, int row) {
  const int32_t token_id = batch_->token_ids[token0_ + row];
  float* const to = out.data + row * out.ld;
  if (embedding.matrix) {
    unpack_row(matrices_[*embedding.matrix], token_id, to);
    return;
  }
  const size_t bytes = row_bytes(embedding.type, embedding.k);
  dequantize_row(embedding.type, embedding.k, embedding.data + token_id * bytes, to);
}

// What one op of a row leaves in the first-level cache, the next one reads.
void Executable::run_rows(const Phase& phase, int row0, int row1) {
  for (int row = row0; row < row1; ++row)
    for (const RowOp& op : phase.ops) run_row_op(op, row);
}

void Executable::run_row_op(const RowOp& op, int row) {
  switch (op.kind) {
    case RowOpKind::Turns: {
      const Turns& turns = turns_[op.table];
      const int64_t pairs = static_cast<int64_t>(turns.frequencies.size());
      float* cosines = turns.rows + row * 2 * pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        const double angle = batch_->positions[token0_ + row] * turns.frequencies[i];
        cosines[i] = static_cast<float>(std::cos(angle));
        cosines[pairs + i] = static_cast<float>(std::sin(angle));
      }
      break;
    }
    case RowOpKind::Embed:
      embed(embeddings_[op.table], buffers_[op.out], row);
      break;
    case RowOpKind::Norm:
      kernels_.rms_norm(view(op.a), vectors_[op.table].data(), op.eps, view(op.out), row);
      break;
    case RowOpKind::Bias:
      kernels_.add_bias(view(op.out), vectors_[op.table].data(), row);
      break;
    case RowOpKind::Quantize:
      kernels_.quantize_rows(activations(op.out), row, row + 1);
      break;
    case RowOpKind::Rope:
      kernels_.rope(view(op.out), op.rope_shape, turns_[op.table].rows, row);
      break;
    case RowOpKind::KvWrite: {
      const KvPool& pool = groups_[op.table];
      const BlockTableView& table = batch_->tables[op.table];
      const Segment& segment = segments_[segment_of_row_[row]];
      const int position = segment.start + row - segment.row0;
      const int64_t block = table.block_ids[table.offsets[segment.sequence] + position / block_size_];
      const KvSlot slot{pool.layer(op.layer) + block * pool.block_stride,
                        pool.head_stride,
                        pool.num_kv_heads,
                        pool.head_dim,
                        block_size_,
                        position % block_size_};
      kernels_.kv_write(buffers_[op.a].data + row * buffers_[op.a].ld, buffers_[op.b].data + row * buffers_[op.b].ld,
                        slot);
      break;
    }
    case RowOpKind::SiluGate:
      kernels_.silu_gate(view(op.a), view(op.b), view(op.out), row);
      break;
    case RowOpKind::Add:
      kernels_.add_rows(view(op.a), view(op.b), view(op.out), row);
      break;
    case RowOpKind::SelectRows: {
      const Buffer &from = buffers_[op.a], &to = buffers_[op.out];
      std::memcpy(to.data + row * to.ld, from.data + (batch_->out_rows[out0_ + row] - token0_) * from.ld,
                  from.width * sizeof(float));
      break;
    }
  }
}

}  // namespace ropeway
