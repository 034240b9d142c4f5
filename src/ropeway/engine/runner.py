"""The runner: turns a `StepPlan` into a `ForwardBatch` and a `SampleBatch`, runs the backend, returns a `StepResult`.

It owns the token row and the block-table rows of every sequence that has run, in storage that lives across steps, and
feeds its own samples back into them. Knows arrays; knows nothing of scheduling, text or models.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress, pairwise
from operator import le
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ropeway.backends.batch import (
    Backend,
    BlockTables,
    Float32Array,
    ForwardBatch,
    Int32Array,
    LayerSlice,
    LogprobRows,
    SampleBatch,
    Samples,
)
from ropeway.core.params import Request
from ropeway.core.plan import BlockGrants, StepPlan, StepResult, TokenLogprobs
from ropeway.engine.grammar_masks import GrammarMasks, Grammars, with_masks
from ropeway.engine.plan_rows import DecodeRun, PlanRows, is_decode
from ropeway.engine.prompt_scores import PromptScores, as_tuples
from ropeway.engine.token_lists import TokenLists, no_token_lists

_Scalar = TypeVar("_Scalar", bound=np.generic)

# The rows of the columns that hold a sequence's sampling parameters, one column per slot.
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY, _NUM_FLOATS = range(7)
_TOP_K, _INDEX, _NUM_PROMPT, _NUM_INTS = range(4)

_NO_SEQUENCES: tuple[int, ...] = ()


class Runner:
    """Executes plans on a backend. One caller at a time; `launch` and `collect` alternate.

    max_num_seqs: slots allocated at the start; more are added when more sequences have run and not ended, as preemption
    allows. max_model_len: most tokens of a sequence, prompt and output. num_cache_groups: block tables per sequence.
    grammars: for requests that have one.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_cache_groups: int = 1,
        grammars: Grammars | None = None,
    ) -> None:
        self._backend = backend
        self._row_tokens = max_model_len + 1  # where max_tokens is 0, one token is drawn behind the prompt all the same
        self._row_blocks = -(-max_model_len // backend.block_size)
        self._pending: dict[int, tuple[Request, int]] = {}  # added, never scheduled: no slot yet
        self._slot_of: dict[int, int] = {}
        self._free_slots: list[int] = []
        self._token_lists = TokenLists()
        self._num_tops: dict[int, int] = {}  # by slot, of those that ask for log-probabilities
        self._prompt_scores = PromptScores()
        self._grammar_masks = GrammarMasks(grammars, backend.vocab_size)
        self._result: StepResult | None = None
        # Decoding repeats the same rows step after step, and gathering them anew costs as much as the rest of a launch.
        self._planned: PlanRows | None = None
        self._sampled: PlanRows | None = None
        self._decode_run: DecodeRun | None = None  # of the last step, where that can be gone on from

        # Storage by slot. Rows are not cleared: what counts is below num_tokens and num_blocks, and untouched pages
        # of a long context cost no memory.
        self._tokens: Int32Array = np.empty((0, self._row_tokens), dtype=np.int32)
        self._blocks: list[Int32Array] = [np.empty((0, self._row_blocks), dtype=np.int32)] * num_cache_groups
        self._num_blocks: list[list[int]] = [[] for _ in range(num_cache_groups)]
        self._num_tokens: Int32Array = np.empty(0, dtype=np.int32)
        self._floats: npt.NDArray[np.float32] = np.empty((_NUM_FLOATS, 0), dtype=np.float32)
        self._ints: Int32Array = np.empty((_NUM_INTS, 0), dtype=np.int32)
        self._seeds: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._grow(max_num_seqs)

    def add(self, sequence_id: int, request: Request, index: int) -> None:
        """Makes a sequence known: number `index` of `request`. It takes storage when a plan first schedules it."""
        assert sequence_id not in self._pending and sequence_id not in self._slot_of, f"sequence {sequence_id} is known"
        self._pending[sequence_id] = (request, index)

    def launch(self, plan: StepPlan) -> None:
        """Runs one step: applies what the plan says changed, computes its rows, draws and feeds back their tokens."""
        assert self._result is None, f"step {plan.step_id} launched before the last result was collected"
        last, self._decode_run = self._decode_run, None
        rows = sampled = self._apply_changes(plan)
        if last is not None and last.is_followed_by(plan, rows):
            return self._go_on(plan, last)
        if not all(plan.is_sampled):
            sampled = self._sampled = self._rows(tuple(compress(plan.sequence_ids, plan.is_sampled)), self._sampled)
        masks = self._grammar_masks.start(sampled.slots)
        num_known = self._num_tokens[rows.slots]
        batch = self._forward_batch(plan, rows, num_known)
        logits, logits_rows, prompt_logprobs = self._logits(batch, rows)
        if not sampled.sequence_ids:
            self._result = StepResult(plan.step_id, (), (), prompt_logprobs=prompt_logprobs)
            return
        kv_lens = batch.kv_lens
        if sampled is not rows:
            is_sampled = np.array(plan.is_sampled, dtype=np.bool_)
            kv_lens, num_known = kv_lens[is_sampled], num_known[is_sampled]
        # A padding row of a static batch ends one token early, and draws its last token again.
        num_least = np.maximum(num_known - 1, sampled.ints[_NUM_PROMPT])
        assert (kv_lens >= num_least).all(), "a sampled row ends too early"
        sample_batch = self._sample_batch(sampled, kv_lens)
        if logits_rows is not None:
            sample_batch = replace(sample_batch, logits_rows=logits_rows)
        if masks is not None:
            sample_batch = with_masks(sample_batch, masks.wait())
        samples = self._backend.sample(logits, sample_batch)
        result = self._feed_back(plan.step_id, sampled, kv_lens, samples)
        if sample_batch.masks is not None:
            complete = self._grammar_masks.accept(sample_batch.masks, sampled.slots, samples)
            result = replace(result, stopped_sequence_ids=tuple(sampled.sequence_ids[row] for row in complete))
        self._result = result if prompt_logprobs is None else replace(result, prompt_logprobs=prompt_logprobs)
        is_plain = masks is None and not rows.has_token_lists and logits_rows is None and not result.failed_sequence_ids
        if is_plain and is_decode(plan):
            self._decode_run = DecodeRun(rows, batch, sample_batch, samples.token_ids)

    def _go_on(self, plan: StepPlan, last: DecodeRun) -> None:
        """The rows of the last step compute the tokens that they drew."""
        last.advance()
        self._check_blocks(last.rows, last.forward.kv_lens)
        samples = self._backend.sample(self._backend.forward(last.forward), last.sample)
        self._result = self._feed_back(plan.step_id, last.rows, last.forward.kv_lens, samples)
        if not self._result.failed_sequence_ids:
            last.drawn = samples.token_ids
            self._decode_run = last

    def collect(self) -> StepResult:
        """The result of the step launched last; each result is collected once."""
        result = self._result
        assert result is not None, "nothing was launched"
        self._result = None
        return result

    def token_ids(self, sequence_id: int) -> tuple[int, ...]:
        """Every token of a sequence that has run: its prompt, then what was drawn."""
        slot = self._slot_of[sequence_id]
        return tuple(self._tokens[slot, : self._num_tokens[slot]].tolist())

    @property
    def num_slots_used(self) -> int:
        return len(self._slot_of)

    def _apply_changes(self, plan: StepPlan) -> PlanRows:
        """Clears, forgets, grants and copies what the plan says; returns its rows."""
        for sequence_id in plan.preempted_ids:
            if sequence_id in self._slot_of:  # repeated after a failed step, it may be forgotten already
                self._hold_nothing(self._slot_of[sequence_id])
        for sequence_id in plan.finished_ids:
            self._forget(sequence_id)
        rows = self._planned = self._rows(plan.sequence_ids, self._planned)
        for group, grants in enumerate(plan.grants):
            self._apply(group, grants, rows.slot_numbers)
        for group, copies in enumerate(plan.copies):
            self._backend.copy_blocks(
                group,
                np.array(copies.source_ids, dtype=np.int32),
                np.array(copies.destination_ids, dtype=np.int32),
            )
        return rows

    def _rows(self, sequence_ids: tuple[int, ...], last: PlanRows | None) -> PlanRows:
        """The rows of these sequences: `last` where it is of the same ones, since a slot and what it says of its
        sequence stay until the sequence is forgotten, and an id does not come again.
        """
        if last is not None and last.sequence_ids == sequence_ids:
            return last
        slot_numbers = [self._slot(sequence_id) for sequence_id in sequence_ids]
        slots = np.array(slot_numbers, dtype=np.int64)
        num_tops = {row: self._num_tops[slot] for row, slot in enumerate(slot_numbers) if slot in self._num_tops}
        return PlanRows(
            sequence_ids=sequence_ids,
            slots=slots,
            slot_numbers=slot_numbers,
            token_offsets=slots * self._row_tokens,
            table_offsets=slots * self._row_blocks,
            order=np.arange(len(slots) + 1, dtype=np.int32),
            floats=self._floats.take(slots, axis=1),
            ints=self._ints.take(slots, axis=1),
            seeds=self._seeds[slots],
            has_token_lists=self._token_lists.has_any(slots),
            logprobs=LogprobRows(np.array(list(num_tops), np.int32), max(num_tops.values())) if num_tops else None,
            num_tops=list(num_tops.values()),
        )

    def _slot(self, sequence_id: int) -> int:
        """The slot of a sequence; one that is scheduled for the first time gets its own."""
        slot = self._slot_of.get(sequence_id)
        if slot is not None:
            return slot
        request, index = self._pending.pop(sequence_id)
        if not self._free_slots:
            self._grow(2 * len(self._num_tokens))
        slot = self._slot_of[sequence_id] = self._free_slots.pop()
        num_prompt, params = len(request.prompt_token_ids), request.params
        assert num_prompt + request.max_tokens < self._row_tokens, f"sequence {sequence_id} exceeds the context"
        self._tokens[slot, :num_prompt] = request.prompt_token_ids
        self._num_tokens[slot] = num_prompt
        self._hold_nothing(slot)
        self._seeds[slot] = request.seed
        self._ints[:, slot] = (params.top_k, index, num_prompt)
        self._floats[:, slot] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._token_lists.add(slot, request)
        if params.logprobs is not None:
            self._num_tops[slot] = params.logprobs
        if params.grammar is not None:
            self._grammar_masks.add(slot, params.grammar)
        if params.prompt_logprobs is not None and index == 0:  # one of n is enough
            self._prompt_scores.add(slot, sequence_id, params.prompt_logprobs)
        return slot

    def _forget(self, sequence_id: int) -> None:
        if self._pending.pop(sequence_id, None) is not None:
            return
        slot = self._slot_of.pop(sequence_id, None)
        if slot is None:  # repeated after a failed step
            return
        self._token_lists.forget(slot)
        self._num_tops.pop(slot, None)
        self._prompt_scores.forget(slot)
        self._grammar_masks.forget(slot)
        self._free_slots.append(slot)

    def _grow(self, num_slots: int) -> None:
        """Enlarges every array; no batch of an earlier step is in use."""
        first = len(self._num_tokens)
        self._tokens = _enlarged(self._tokens, 0, num_slots)
        self._blocks = [_enlarged(blocks, 0, num_slots) for blocks in self._blocks]
        for counts in self._num_blocks:
            counts += [0] * (num_slots - first)
        self._num_tokens = _enlarged(self._num_tokens, 0, num_slots)
        self._floats = _enlarged(self._floats, 1, num_slots)
        self._ints = _enlarged(self._ints, 1, num_slots)
        self._seeds = _enlarged(self._seeds, 0, num_slots)
        self._free_slots.extend(reversed(range(first, num_slots)))

    def _hold_nothing(self, slot: int) -> None:
        for counts in self._num_blocks:
            counts[slot] = 0

    def _apply(self, group: int, grants: BlockGrants, slot_numbers: list[int]) -> None:
        """Appends the granted blocks to the table rows."""
        if not grants.block_ids:
            return
        blocks, counts = self._blocks[group], self._num_blocks[group]
        for slot, (begin, end) in zip(slot_numbers, pairwise(grants.indptr), strict=True):
            if begin != end:
                first, counts[slot] = counts[slot], counts[slot] + end - begin
                assert counts[slot] <= self._row_blocks, "a sequence was granted more blocks than its context holds"
                blocks[slot, first : counts[slot]] = grants.block_ids[begin:end]

    def _check_blocks(self, rows: PlanRows, kv_lens: Int32Array) -> None:
        """Every row has the blocks that its tokens are in."""
        block_size, lengths = self._backend.block_size, kv_lens.tolist()
        for counts in self._num_blocks:
            num_slots = [counts[slot] * block_size for slot in rows.slot_numbers]
            assert all(map(le, lengths, num_slots)), "a row lacks blocks"

    def _forward_batch(self, plan: StepPlan, rows: PlanRows, num_known: Int32Array) -> ForwardBatch:
        """num_known[S]: tokens that each row has."""
        starts = np.array(plan.starts, dtype=np.int32)
        if plan.total_num_tokens == plan.num_rows:
            kv_lens, query_indptr, positions = starts + np.int32(1), rows.order, starts
            token_index = rows.token_offsets + starts
        else:
            num_tokens = np.array(plan.num_tokens, dtype=np.int32)
            kv_lens = starts + num_tokens
            query_indptr = np.zeros(len(starts) + 1, dtype=np.int32)
            np.cumsum(num_tokens, out=query_indptr[1:])
            within = np.arange(query_indptr[-1], dtype=np.int32)
            positions = np.repeat(starts - query_indptr[:-1], num_tokens) + within
            token_index = np.repeat(rows.token_offsets, num_tokens) + positions
        assert (kv_lens <= num_known).all(), "a row computes tokens that are not known yet"
        self._check_blocks(rows, kv_lens)
        last_rows = query_indptr[1:] - np.int32(1)
        return ForwardBatch(
            token_ids=self._tokens.reshape(-1)[token_index],
            positions=positions,
            query_indptr=query_indptr,
            kv_lens=kv_lens,
            tables=tuple(BlockTables(blocks.reshape(-1), rows.table_offsets) for blocks in self._blocks),
            out_rows=last_rows if all(plan.is_sampled) else last_rows[np.array(plan.is_sampled, dtype=np.bool_)],
            layer_slice=None if plan.layer_slice is None else LayerSlice(*plan.layer_slice),
        )

    def _logits(
        self, batch: ForwardBatch, rows: PlanRows
    ) -> tuple[Float32Array, Int32Array | None, dict[int, tuple[TokenLogprobs, ...]] | None]:
        """The logits of a step; with prompt tokens to score also which rows are those of `batch`, and the scores."""
        due = self._prompt_scores.due(batch, rows.slots, self._tokens, rows.ints[_NUM_PROMPT])
        if due is None:
            return self._backend.forward(batch), None, None
        # No row is in both: a token that is scored is known, one that is sampled is not.
        out_rows = np.union1d(batch.out_rows, due.out_rows).astype(np.int32)
        logits = self._backend.forward(replace(batch, out_rows=out_rows))
        scores = self._backend.score(logits, due.batch(out_rows))
        return logits, np.searchsorted(out_rows, batch.out_rows).astype(np.int32), self._prompt_scores.take(due, scores)

    def _sample_batch(self, rows: PlanRows, num_tokens: Int32Array) -> SampleBatch:
        """num_tokens[R]: tokens of each row before the one to be drawn."""
        floats, ints = rows.floats, rows.ints
        lists = (
            self._token_lists.columns(rows.slots, self._tokens, ints[_NUM_PROMPT], num_tokens)
            if rows.has_token_lists
            else no_token_lists(len(num_tokens))
        )
        return SampleBatch(
            temperature=floats[_TEMPERATURE],
            top_k=ints[_TOP_K],
            top_p=floats[_TOP_P],
            min_p=floats[_MIN_P],
            seed=rows.seeds,
            index=ints[_INDEX],
            position=num_tokens,
            repetition_penalty=floats[_REPETITION],
            presence_penalty=floats[_PRESENCE],
            frequency_penalty=floats[_FREQUENCY],
            history=self._tokens.reshape(-1),
            history_offsets=rows.token_offsets,
            num_prompt_tokens=ints[_NUM_PROMPT],
            num_tokens=num_tokens,
            bias_indptr=lists.bias_indptr,
            bias_ids=lists.bias_ids,
            bias_values=lists.bias_values,
            banned_indptr=lists.banned_indptr,
            banned_ids=lists.banned_ids,
            logprobs=rows.logprobs,
        )

    def _feed_back(self, step_id: int, rows: PlanRows, num_tokens: Int32Array, samples: Samples) -> StepResult:
        """Appends the drawn tokens behind the num_tokens[R] of their rows; a failed row keeps what it had."""
        sequence_ids, token_ids, failed_ids = rows.sequence_ids, samples.token_ids, _NO_SEQUENCES
        slots, offsets = rows.slots, rows.token_offsets
        if samples.is_failed.any():
            self._num_tokens[slots] = num_tokens
            is_drawn = ~samples.is_failed
            failed_ids = tuple(compress(sequence_ids, samples.is_failed.tolist()))
            sequence_ids = tuple(compress(sequence_ids, is_drawn.tolist()))
            slots, offsets = slots[is_drawn], offsets[is_drawn]
            num_tokens, token_ids = num_tokens[is_drawn], token_ids[is_drawn]
        self._tokens.reshape(-1)[offsets + num_tokens] = token_ids
        self._num_tokens[slots] = num_tokens + np.int32(1)
        logprobs = None if rows.logprobs is None else _drawn_logprobs(rows, samples, failed_ids)
        return StepResult(step_id, sequence_ids, tuple(token_ids.tolist()), failed_ids, logprobs=logprobs)


def _enlarged(array: npt.NDArray[_Scalar], axis: int, length: int) -> npt.NDArray[_Scalar]:
    """A copy of `array` with room for `length` entries along `axis`; the new entries are not initialised."""
    shape = list(array.shape)
    shape[axis] = length
    larger = np.empty(shape, dtype=array.dtype)
    larger[tuple(slice(n) for n in array.shape)] = array
    return larger


def _drawn_logprobs(rows: PlanRows, samples: Samples, failed_ids: tuple[int, ...]) -> dict[int, TokenLogprobs]:
    """By sequence id, of the rows that ask and did not fail."""
    assert rows.logprobs is not None and samples.logprobs is not None, "the backend gave no log-probabilities"
    asking = rows.logprobs.rows
    every = as_tuples(samples.token_ids[asking], samples.logprobs, range(len(asking)), rows.num_tops)
    by_id = zip([rows.sequence_ids[row] for row in asking.tolist()], every, strict=True)
    return {sequence_id: logprobs for sequence_id, logprobs in by_id if sequence_id not in failed_ids}
