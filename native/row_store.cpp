#include "row_store.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace ropeway {

SlotStorage::SlotStorage(int num_slots, int num_groups, int max_tokens, int max_blocks)
    : num_slots(num_slots),
      max_tokens(max_tokens),
      max_blocks(max_blocks),
      tokens(new int32_t[int64_t{num_slots} * max_tokens]) {
  for (int group = 0; group < num_groups; ++group) blocks.emplace_back(new int32_t[int64_t{num_slots} * max_blocks]);
}

ForwardBatch StepRows::forward_batch() const {
  const int64_t num_ids = int64_t{storage->num_slots} * storage->max_blocks;
  ForwardBatch batch{token_ids, positions, query_indptr, kv_lens, out_rows, {}, layer_slice};
  for (const auto& ids : storage->blocks)
    batch.tables.push_back({{ids.get(), static_cast<size_t>(num_ids)}, table_offsets});
  return batch;
}

SampleRow StepRows::sample_row(int64_t row, float* logits, int32_t vocab_size) const {
  const Sampled& own = sampled[row];
  const SampleParams& params = own.params;
  return {.logits = logits,
          .vocab_size = vocab_size,
          .temperature = params.temperature,
          .top_k = params.top_k,
          .top_p = params.top_p,
          .min_p = params.min_p,
          .seed = params.seed,
          .index = params.index,
          .position = own.num_tokens,
          .repetition_penalty = params.repetition_penalty,
          .presence_penalty = params.presence_penalty,
          .frequency_penalty = params.frequency_penalty,
          .history = storage->tokens_of(own.slot),
          .num_prompt_tokens = own.num_prompt_tokens,
          .num_tokens = own.num_tokens,
          .bias_ids = nullptr,
          .bias_values = nullptr,
          .num_biases = 0,
          .banned_ids = nullptr,
          .num_banned = 0,
          .mask = nullptr};
}

RowStore::RowStore(int num_groups, int max_tokens, int max_blocks, int block_size)
    : block_size_(block_size),
      storage_(std::make_shared<SlotStorage>(0, num_groups, max_tokens, max_blocks)),
      num_blocks_(num_groups) {}

const RowStore::Slot& RowStore::known(int slot) const {
  if (slot < 0 || slot >= num_slots()) throw ImpossibleStep("there is no slot " + std::to_string(slot));
  return slots_[slot];
}

std::span<const int32_t> RowStore::tokens(int slot) const {
  return {storage_->tokens_of(slot), static_cast<size_t>(known(slot).num_tokens)};
}

void RowStore::grow(int num_slots) {
  const int num_groups = static_cast<int>(num_blocks_.size());
  auto larger = std::make_shared<SlotStorage>(num_slots, num_groups, storage_->max_tokens, storage_->max_blocks);
  for (int slot = 0; slot < std::min(num_slots, storage_->num_slots); ++slot) {
    std::copy_n(storage_->tokens_of(slot), slots_[slot].num_tokens, larger->tokens_of(slot));
    for (int group = 0; group < num_groups; ++group)
      std::copy_n(storage_->blocks_of(group, slot), num_blocks_[group][slot], larger->blocks_of(group, slot));
  }
  storage_ = std::move(larger);
  slots_.resize(num_slots);
  for (std::vector<int32_t>& counts : num_blocks_) counts.resize(num_slots);
}

void RowStore::begin(int slot, std::span<const int32_t> prompt, const SampleParams& params) {
  known(slot);
  if (prompt.size() > static_cast<size_t>(storage_->max_tokens))
    throw ImpossibleStep("a prompt of " + std::to_string(prompt.size()) + " tokens exceeds the context");
  std::copy(prompt.begin(), prompt.end(), storage_->tokens_of(slot));
  const int32_t num_prompt_tokens = static_cast<int32_t>(prompt.size());
  slots_[slot] = {num_prompt_tokens, num_prompt_tokens, params};
  clear_blocks(slot);
}

void RowStore::clear_blocks(int slot) {
  known(slot);
  for (std::vector<int32_t>& counts : num_blocks_) counts[slot] = 0;
}

void RowStore::grant(int group, std::span<const int32_t> slots, std::span<const int32_t> indptr,
                     std::span<const int32_t> block_ids) {
  if (indptr.size() != slots.size() + 1 || indptr.front() != 0 || indptr.back() != std::ssize(block_ids) ||
      !std::is_sorted(indptr.begin(), indptr.end()))
    throw ImpossibleStep("block grants of another number of rows or blocks");
  for (size_t r = 0; r < slots.size(); ++r) {
    const int32_t slot = slots[r], num_granted = indptr[r + 1] - indptr[r];
    known(slot);
    int32_t& count = num_blocks_.at(group)[slot];
    if (num_granted > storage_->max_blocks - count)
      throw ImpossibleStep("a sequence was granted more blocks than its context holds");
    std::copy_n(block_ids.data() + indptr[r], num_granted, storage_->blocks_of(group, slot) + count);
    count += num_granted;
  }
}

StepRows RowStore::gather(const StepColumns& step) const {
  const size_t num_rows = step.slots.size();
  if (step.starts.size() != num_rows || step.num_tokens.size() != num_rows || step.is_sampled.size() != num_rows)
    throw ImpossibleStep("the columns of a step differ in length");
  StepRows rows;
  rows.storage = storage_;
  rows.layer_slice = step.layer_slice;
  rows.query_indptr.push_back(0);
  for (size_t r = 0; r < num_rows; ++r) {
    const int32_t slot = step.slots[r], start = step.starts[r], num_tokens = step.num_tokens[r];
    const Slot& own = known(slot);
    if (start < 0 || num_tokens < 1 || int64_t{start} + num_tokens > own.num_tokens)
      throw ImpossibleStep("a row computes tokens that are not known yet");
    const int32_t kv_len = start + num_tokens;
    for (const std::vector<int32_t>& counts : num_blocks_)
      if (int64_t{counts[slot]} * block_size_ < kv_len) throw ImpossibleStep("a row lacks blocks");
    const int32_t* tokens = storage_->tokens_of(slot);
    rows.token_ids.insert(rows.token_ids.end(), tokens + start, tokens + kv_len);
    for (int32_t position = start; position < kv_len; ++position) rows.positions.push_back(position);
    rows.query_indptr.push_back(static_cast<int32_t>(rows.token_ids.size()));
    rows.kv_lens.push_back(kv_len);
    rows.table_offsets.push_back(int64_t{slot} * storage_->max_blocks);
    if (!step.is_sampled[r]) continue;
    if (kv_len < std::max(own.num_tokens - 1, own.num_prompt_tokens))
      throw ImpossibleStep("a sampled row ends too early");
    rows.out_rows.push_back(rows.query_indptr.back() - 1);
    rows.sampled.push_back({slot, kv_len, own.num_prompt_tokens, own.params});
  }
  return rows;
}

void RowStore::append(const StepRows& rows, std::span<const SampleDraw> draws) {
  for (size_t i = 0; i < rows.sampled.size(); ++i) {
    const auto& [slot, num_tokens, num_prompt_tokens, params] = rows.sampled[i];
    if (num_tokens >= storage_->max_tokens) throw ImpossibleStep("a sequence exceeds its context");
    if (!draws[i].is_failed) storage_->tokens_of(slot)[num_tokens] = draws[i].token_id;
    slots_[slot].num_tokens = num_tokens + !draws[i].is_failed;
  }
}

}  // namespace ropeway
