"""The runner: turns a `StepPlan` into the rows of a step, runs the backend on them, returns a `StepResult`.

It owns a slot of the row store for every sequence that has run: tokens, block tables and sampling parameters, which
live across steps, and to which it feeds back what is drawn. Knows arrays; knows nothing of scheduling, text or models.
"""

from __future__ import annotations

from itertools import compress

import numpy as np

from ropeway._native import RowStore, StepRows
from ropeway.backends.batch import (
    Backend,
    BlockTables,
    Draws,
    Float32Array,
    ForwardBatch,
    Int32Array,
    LayerSlice,
    LogprobRows,
    SampleBatch,
    SampleRows,
)
from ropeway.core.params import Request
from ropeway.core.plan import StepPlan, StepResult, TokenLogprobs
from ropeway.engine.grammar_masks import GrammarMasks, Grammars, PendingMasks, with_masks
from ropeway.engine.prompt_scores import PromptScores, as_tuples
from ropeway.engine.token_lists import TokenLists

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
        self._max_tokens = max_model_len + 1  # where max_tokens is 0, one token is drawn behind the prompt all the same
        # A step gathers its rows with all the caches gone to the model: a call of numpy takes some 8 us then, and it
        # took forty.
        self._store = RowStore(
            num_groups=num_cache_groups,
            max_tokens=self._max_tokens,
            max_blocks=-(-max_model_len // backend.block_size),
            block_size=backend.block_size,
        )
        self._pending: dict[int, tuple[Request, int]] = {}  # added, never scheduled: no slot yet
        self._slot_of: dict[int, int] = {}
        self._free_slots: list[int] = []
        self._token_lists = TokenLists()
        self._num_tops: dict[int, int] = {}  # by slot, of those that ask for log-probabilities
        self._prompt_scores = PromptScores()
        self._grammar_masks = GrammarMasks(grammars, backend.vocab_size)
        self._result: StepResult | None = None
        self._grow(max_num_seqs)

    def add(self, sequence_id: int, request: Request, index: int) -> None:
        """Makes a sequence known: number `index` of `request`. It takes storage when a plan first schedules it."""
        assert sequence_id not in self._pending and sequence_id not in self._slot_of, f"sequence {sequence_id} is known"
        self._pending[sequence_id] = (request, index)

    def launch(self, plan: StepPlan) -> None:
        """Runs one step: applies what the plan says changed, computes its rows, draws and feeds back their tokens."""
        assert self._result is None, f"step {plan.step_id} launched before the last result was collected"
        slots = self._apply_changes(plan)
        layer_slice = None if plan.layer_slice is None else LayerSlice(*plan.layer_slice)
        rows = self._store.gather(slots, plan.starts, plan.num_tokens, plan.is_sampled, layer_slice)
        sampled_ids, sampled_slots = plan.sequence_ids, slots
        if not all(plan.is_sampled):
            sampled_ids = tuple(compress(plan.sequence_ids, plan.is_sampled))
            sampled_slots = list(compress(slots, plan.is_sampled))
        masks = self._grammar_masks.start(sampled_slots)
        logits, logits_rows, prompt_logprobs = self._logits(rows, slots)
        if not sampled_ids:
            self._result = StepResult(plan.step_id, (), (), prompt_logprobs=prompt_logprobs)
            return
        num_tops: dict[int, int] = {}
        if self._num_tops:
            num_tops = {row: self._num_tops[slot] for row, slot in enumerate(sampled_slots) if slot in self._num_tops}
        batch = self._sample_batch(rows, sampled_slots, logits_rows, masks, num_tops)
        samples = self._backend.sample(logits, batch)
        token_ids = self._store.append(rows, samples)
        drawn_ids, failed_ids = sampled_ids, _NO_SEQUENCES
        if len(token_ids) < len(sampled_ids):
            is_failed = samples.is_failed.tolist()
            failed_ids = tuple(compress(sampled_ids, is_failed))
            drawn_ids = tuple([sequence_id for sequence_id in sampled_ids if sequence_id not in failed_ids])
        stopped_ids = _NO_SEQUENCES
        if masks is not None:
            complete = self._grammar_masks.accept(masks.rows, sampled_slots, samples)
            stopped_ids = tuple([sampled_ids[row] for row in complete])
        logprobs = _drawn_logprobs(num_tops, sampled_ids, samples, failed_ids) if num_tops else None
        self._result = StepResult(
            plan.step_id, drawn_ids, token_ids, failed_ids, stopped_ids, logprobs, prompt_logprobs
        )

    def collect(self) -> StepResult:
        """The result of the step launched last; each result is collected once."""
        result = self._result
        assert result is not None, "nothing was launched"
        self._result = None
        return result

    def token_ids(self, sequence_id: int) -> tuple[int, ...]:
        """Every token of a sequence that has run: its prompt, then what was drawn."""
        return self._store.tokens(self._slot_of[sequence_id])

    @property
    def num_slots_used(self) -> int:
        return len(self._slot_of)

    def _apply_changes(self, plan: StepPlan) -> list[int]:
        """Clears, forgets, grants and copies what the plan says; returns the slot of each of its rows."""
        for sequence_id in plan.preempted_ids:
            if sequence_id in self._slot_of:  # repeated after a failed step, it may be forgotten already
                self._store.clear_blocks(self._slot_of[sequence_id])
        for sequence_id in plan.finished_ids:
            self._forget(sequence_id)
        slots = self._slots(plan.sequence_ids)
        for group, grants in enumerate(plan.grants):
            if grants.block_ids:
                self._store.grant(group, slots, grants.indptr, grants.block_ids)
        for group, copies in enumerate(plan.copies):
            self._backend.copy_blocks(
                group,
                np.array(copies.source_ids, dtype=np.int32),
                np.array(copies.destination_ids, dtype=np.int32),
            )
        return slots

    def _slots(self, sequence_ids: tuple[int, ...]) -> list[int]:
        """The slot of each sequence; one that is scheduled for the first time gets its own."""
        try:
            return [self._slot_of[sequence_id] for sequence_id in sequence_ids]
        except KeyError:  # in most steps there is none
            return [self._slot(sequence_id) for sequence_id in sequence_ids]

    def _slot(self, sequence_id: int) -> int:
        slot = self._slot_of.get(sequence_id)
        if slot is not None:
            return slot
        request, index = self._pending.pop(sequence_id)
        num_tokens, params = len(request.prompt_token_ids) + request.max_tokens, request.params
        assert num_tokens < self._max_tokens, f"sequence {sequence_id} exceeds the context"
        if not self._free_slots:
            self._grow(2 * self._store.num_slots)
        slot = self._slot_of[sequence_id] = self._free_slots.pop()
        self._store.begin(
            slot,
            request.prompt_token_ids,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            index=index,
            seed=request.seed,
        )
        self._token_lists.add(slot, request)
        if params.logprobs is not None:
            self._num_tops[slot] = params.logprobs
        if params.grammar is not None:
            self._grammar_masks.add(slot, params.grammar)
        if params.prompt_logprobs is not None and index == 0:  # one of n is enough
            self._prompt_scores.add(slot, sequence_id, len(request.prompt_token_ids), params.prompt_logprobs)
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
        self._free_slots.extend(reversed(range(self._store.num_slots, num_slots)))
        self._store.grow(num_slots)

    def _logits(
        self, rows: StepRows, slots: list[int]
    ) -> tuple[Float32Array, Int32Array | None, dict[int, tuple[TokenLogprobs, ...]] | None]:
        """The logits of a step; with prompt tokens to score also which rows are those that sample, and the scores."""
        due = self._prompt_scores.due(rows, slots, self._store)
        if due is None:
            return self._backend.forward(rows), None, None
        # No row is in both: a token that is scored is known, one that is sampled is not.
        out_rows = np.union1d(rows.out_rows, due.out_rows).astype(np.int32)
        logits = self._backend.forward(
            ForwardBatch(
                token_ids=rows.token_ids,
                positions=rows.positions,
                query_indptr=rows.query_indptr,
                kv_lens=rows.kv_lens,
                tables=tuple([BlockTables(table.block_ids, table.offsets) for table in rows.tables]),
                out_rows=out_rows,
                layer_slice=rows.layer_slice,
            )
        )
        scores = self._backend.score(logits, due.batch(out_rows))
        return logits, np.searchsorted(out_rows, rows.out_rows).astype(np.int32), self._prompt_scores.take(due, scores)

    def _sample_batch(
        self,
        rows: StepRows,
        slots: list[int],
        logits_rows: Int32Array | None,
        masks: PendingMasks | None,
        num_tops: dict[int, int],
    ) -> SampleRows:
        """The rows themselves where nothing more is asked of any. slots: of those that sample. num_tops: of those of
        them that ask for log-probabilities.
        """
        has_lists = self._token_lists.has_any(slots)
        if logits_rows is None and masks is None and not has_lists and not num_tops:
            return rows
        lists = self._token_lists.columns(rows, slots, self._store) if has_lists else rows
        batch = SampleBatch(
            temperature=rows.temperature,
            top_k=rows.top_k,
            top_p=rows.top_p,
            min_p=rows.min_p,
            seed=rows.seed,
            index=rows.index,
            position=rows.position,
            repetition_penalty=rows.repetition_penalty,
            presence_penalty=rows.presence_penalty,
            frequency_penalty=rows.frequency_penalty,
            history=rows.history,
            history_offsets=rows.history_offsets,
            num_prompt_tokens=rows.num_prompt_tokens,
            num_tokens=rows.num_tokens,
            bias_indptr=lists.bias_indptr,
            bias_ids=lists.bias_ids,
            bias_values=lists.bias_values,
            banned_indptr=lists.banned_indptr,
            banned_ids=lists.banned_ids,
            logits_rows=logits_rows,
            logprobs=LogprobRows(np.array(list(num_tops), np.int32), max(num_tops.values())) if num_tops else None,
        )
        return batch if masks is None else with_masks(batch, masks.wait())


def _drawn_logprobs(
    num_tops: dict[int, int], sampled_ids: tuple[int, ...], samples: Draws, failed_ids: tuple[int, ...]
) -> dict[int, TokenLogprobs]:
    """By sequence id, of the rows that ask and did not fail. num_tops: of the rows that ask, in order."""
    assert samples.logprobs is not None, "the backend gave no log-probabilities"
    asking = list(num_tops)
    every = as_tuples(samples.token_ids[asking], samples.logprobs, range(len(asking)), list(num_tops.values()))
    by_id = zip([sampled_ids[row] for row in asking], every, strict=True)
    return {sequence_id: logprobs for sequence_id, logprobs in by_id if sequence_id not in failed_ids}
