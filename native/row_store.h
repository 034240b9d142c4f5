// What a runner keeps of its sequences, by slot: tokens, block tables and how to sample; and the rows of one step,
// gathered from it in one pass. Knows no Python, no scheduling and no model.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "executable.h"
#include "sample_row.h"

namespace ropeway {

// A step that contradicts what is stored.
struct ImpossibleStep : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// How a sequence is sampled: fields of SampleRow.
struct SampleParams {
  float temperature = 0.0f, top_p = 1.0f, min_p = 0.0f;
  float repetition_penalty = 1.0f, presence_penalty = 0.0f, frequency_penalty = 0.0f;
  int32_t top_k = 0, index = 0;
  uint64_t seed = 0;
};

// Of num_slots sequences, not initialised: what nobody has written costs no memory.
struct SlotStorage {
  SlotStorage(int num_slots, int num_groups, int max_tokens, int max_blocks);

  int32_t* tokens_of(int slot) { return tokens.get() + int64_t{slot} * max_tokens; }
  int32_t* blocks_of(int group, int slot) { return blocks[group].get() + int64_t{slot} * max_blocks; }

  const int num_slots, max_tokens, max_blocks;
  std::unique_ptr<int32_t[]> tokens;               // [num_slots][max_tokens]
  std::vector<std::unique_ptr<int32_t[]>> blocks;  // of a cache group: [num_slots][max_blocks]
};

// What a step says of its rows, S of each; layer_slice is backends/batch.py's.
struct StepColumns {
  std::vector<int32_t> slots, starts, num_tokens;
  std::vector<uint8_t> is_sampled;
  std::optional<LayerSlice> layer_slice;
};

// The rows of a step: a ForwardBatch, and of the R rows that are sampled a SampleBatch (backends/batch.py) without
// biases, bans, masks and log-probabilities. Stays as it is while sequences go on, but for the storage it points into.
struct StepRows {
  struct Sampled {
    int32_t slot, num_tokens, num_prompt_tokens;
    SampleParams params;
  };

  std::shared_ptr<SlotStorage> storage;
  std::vector<int32_t> token_ids, positions, query_indptr, kv_lens, out_rows;
  std::vector<int64_t> table_offsets;  // [S], in the blocks of every cache group
  std::vector<Sampled> sampled;        // [R]
  std::optional<LayerSlice> layer_slice;

  ForwardBatch forward_batch() const;
  SampleRow sample_row(int64_t row, float* logits, int32_t vocab_size) const;
};

class RowStore {
 public:
  // max_tokens, max_blocks: the most of a sequence.
  RowStore(int num_groups, int max_tokens, int max_blocks, int block_size);

  int num_slots() const { return storage_->num_slots; }
  const std::shared_ptr<SlotStorage>& storage() const { return storage_; }
  std::span<const int32_t> tokens(int slot) const;

  // More slots, which hold nothing.
  void grow(int num_slots);

  // A sequence takes a slot: its prompt, no blocks. Throws ImpossibleStep for a prompt that does not fit.
  void begin(int slot, std::span<const int32_t> prompt, const SampleParams& params);

  // The sequence loses its blocks and keeps its tokens.
  void clear_blocks(int slot);

  // Appends block_ids[indptr[r] .. indptr[r + 1]) to the block table of slots[r]. Throws ImpossibleStep where one gets
  // more than max_blocks.
  void grant(int group, std::span<const int32_t> slots, std::span<const int32_t> indptr,
             std::span<const int32_t> block_ids);

  // Throws ImpossibleStep where a row computes tokens that are not known, lacks blocks for them, or is sampled before
  // its last known token. (A padding row of a static batch ends one token early, and draws its last token again.)
  StepRows gather(const StepColumns& step) const;

  // Appends what each of the R sampled rows drew; those that failed get nothing.
  void append(const StepRows& rows, std::span<const SampleDraw> draws);

 private:
  struct Slot {
    int32_t num_tokens = 0, num_prompt_tokens = 0;
    SampleParams params;
  };

  const Slot& known(int slot) const;

  const int block_size_;
  std::shared_ptr<SlotStorage> storage_;
  std::vector<Slot> slots_;
  std::vector<std::vector<int32_t>> num_blocks_;  // of a cache group, by slot
};

}  // namespace ropeway
