"""Collects the rows of one step's plan within its budget. Knows no queues, memory or policies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ropeway.core.pacing import StepBudget
from ropeway.core.plan import BlockCopies, BlockGrants, LayerSlice, StepPlan
from ropeway.core.sequence import Sequence as TokenSequence
from ropeway.core.wave import Wave

Granted = tuple[int, Sequence[Sequence[int]]]  # a row, and the block ids it is granted in each cache group


class PlanBuilder:
    """Rows of a plan being made; adding one of a prompt advances its sequence's num_computed_tokens."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._sequence_ids: list[int] = []
        self._starts: list[int] = []
        self._num_tokens: list[int] = []
        self._is_sampled: list[bool] = []
        self._granted: list[Granted] = []
        self._long_rows: list[tuple[int, TokenSequence]] = []  # prompts longer than the step, which share it
        self._chunks: list[tuple[TokenSequence, int]] = []  # of prompts, with where they start
        self.wave: Wave | None = None  # of which a slice is in the step
        self._layer_slice: LayerSlice | None = None
        self.whole_id: int | None = None  # of the sequence whose long prompt took the step, instead of half of it
        self.num_prompt_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_padding_tokens = 0

    @property
    def num_rows(self) -> int:
        return len(self._starts)

    @property
    def num_context_tokens(self) -> int:
        """Positions that the rows attend to, as long as each row is one token."""
        return sum(self._starts) + len(self._starts)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that one more sequence could compute from its start."""
        return self.budget.num_prefill_tokens(0)

    def add_decodes(self, sequence_ids: list[int], starts: list[int], granted: list[Granted]) -> None:
        """Plan one token for each decoding sequence, before anything else; the lists become the builder's own.

        starts: of each, the position of that token. granted: blocks for some of them, which it names by their index.
        """
        self._sequence_ids, self._starts, self._granted = sequence_ids, starts, granted
        self._num_tokens = [1] * len(starts)
        self._is_sampled = [True] * len(starts)

    def add_padding(self, sequence: TokenSequence) -> None:
        """Plan the last computed token of a finished sequence again; what it samples is dropped."""
        self._add_row(sequence.sequence_id, sequence.num_computed_tokens - 1, 1, True)
        self.num_padding_tokens += 1

    def begin_prefills(self, budget: StepBudget) -> None:
        """The decodes are added; what follows takes from `budget`."""
        self.budget = budget
        self.has_turns = False  # long prompts take steps in turn, instead of halves of each
        self._num_budgeted = budget.num_prefill_tokens(0)

    def go_on(self, wave: Wave) -> bool:
        """Plan the next slice of a wave, before any prompt; False where the step has no place for its tokens."""
        has_place = self._take_slice(wave)
        self._num_budgeted = self.budget.num_prefill_tokens(0)
        return has_place

    def add_prefill(self, sequence: TokenSequence, *, goes_first: bool) -> None:
        """Plan as many uncomputed tokens of a sequence as the budget leaves; no row where it leaves none.

        One that is longer than the step takes half of it, and what nobody else wants; longer than two, where it goes
        first: halved, a prompt of 1.5 steps would take three. It takes all of a step that is too short to be shared,
        and gives way in the next. Its first row since it boarded carries its whole block table. It begins a wave where
        the budget says that this gets it further.
        """
        start = sequence.num_computed_tokens
        if self.wave is None:
            found = self.budget.wave(start, sequence.num_tokens - start)
            if found is not None and self._take_slice(Wave(sequence, start, *found)):
                return
        num_tokens = min(sequence.num_tokens - start, self.budget.num_prefill_tokens(start))
        if num_tokens <= 0:
            return
        num_whole = 2 * self._num_budgeted if goes_first else self._num_budgeted
        if sequence.num_tokens - start > num_whole and self._num_budgeted > 1:
            if not self._chunks and (self.has_turns or not self.budget.is_worth_sharing(start)):
                self.whole_id = sequence.sequence_id
            else:
                num_tokens = min(num_tokens, self._num_budgeted // 2)
                self._long_rows.append((len(self._starts), sequence))
        self._announce(sequence)
        end = start + num_tokens
        is_sampled = end == sequence.num_tokens
        self._add_row(sequence.sequence_id, start, num_tokens, is_sampled)
        self.budget.add_prefill(start, num_tokens, is_sampled)
        sequence.num_computed_tokens = end
        self._chunks.append((sequence, start))

    def end_prefills(self) -> list[tuple[TokenSequence, int]]:
        """Share out what is left of the budget; those with a chunk, and how many tokens of it are new."""
        for row, sequence in self._long_rows:
            start = sequence.num_computed_tokens
            # One token at least stays uncomputed: the row is not sampled.
            num_tokens = min(sequence.num_tokens - start - 1, self.budget.num_prefill_tokens(start, is_more=True))
            if num_tokens > 0:
                self._num_tokens[row] += num_tokens
                self.budget.add_prefill(start, num_tokens, False, is_more=True)
                sequence.num_computed_tokens += num_tokens
        if self.wave is not None:
            self._add_slice(self.wave)
        chunks = []
        for sequence, start in self._chunks:
            end = sequence.num_computed_tokens
            num_first_new = max(start, sequence.num_recompute_tokens)  # positions below were computed before
            self.num_recomputed_tokens += max(0, min(end, num_first_new) - start)
            self.num_prompt_tokens += max(0, min(end, sequence.num_prompt_tokens) - num_first_new)
            chunks.append((sequence, max(0, end - num_first_new)))
        return chunks

    def build(
        self,
        step_id: int,
        preempted_ids: tuple[int, ...],
        finished_ids: tuple[int, ...],
        copies: tuple[BlockCopies, ...],
    ) -> StepPlan:
        """The plan, as plain columns."""
        counts = [0] * len(self._starts)
        for row, granted in self._granted:
            counts[row] = len(granted[0])
        indptr = tuple(accumulate(counts, initial=0))
        return StepPlan(
            step_id,
            tuple(self._sequence_ids),
            tuple(self._starts),
            tuple(self._num_tokens),
            tuple(self._is_sampled),
            tuple([BlockGrants(indptr, self._granted_ids(group)) for group in range(self._num_groups)]),
            preempted_ids,
            finished_ids,
            copies,
            self._layer_slice,
        )

    def _take_slice(self, wave: Wave) -> bool:
        """Take the next slice of a wave from the budget."""
        if not self.budget.take_slice(wave.start, wave.num_tokens, wave.next_slice, wave.is_sampled):
            return False
        self.wave = wave
        return True

    def _add_slice(self, wave: Wave) -> None:
        """Plan it, as the last row; with the last slice the tokens are computed."""
        sequence, start = wave.sequence, wave.start
        self._announce(sequence)
        self._add_row(sequence.sequence_id, start, wave.num_tokens, wave.is_sampled)
        self._layer_slice = wave.next_slice
        wave.num_done += 1
        if wave.is_done:
            sequence.num_computed_tokens = start + wave.num_tokens
            self._chunks.append((sequence, start))
            self.whole_id = sequence.sequence_id

    def _announce(self, sequence: TokenSequence) -> None:
        """Grant the row to come the whole block table of a sequence that has boarded."""
        if not sequence.is_announced:
            self._granted.append((len(self._starts), sequence.block_ids))
            sequence.is_announced = True

    def _add_row(self, sequence_id: int, start: int, num_tokens: int, is_sampled: bool) -> None:
        self._sequence_ids.append(sequence_id)
        self._starts.append(start)
        self._num_tokens.append(num_tokens)
        self._is_sampled.append(is_sampled)

    def _granted_ids(self, group: int) -> tuple[int, ...]:
        return tuple([block_id for _, granted in self._granted for block_id in granted[group]])
