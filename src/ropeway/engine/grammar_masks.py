"""The grammars of sequences that have one: masks are filled on a thread of their own while `forward` computes.

Keyed by the runner's slots. What a grammar is belongs to the text side; here it is text, a matcher and a row of bits.
Knows arrays and one thread; knows nothing of scheduling or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ropeway.backends.batch import Draws, Int32Array, SampleBatch, TokenMasks


class Grammars(Protocol):
    """Makes matchers, each of which follows one sequence through its grammar; `text.grammar.Grammars` is one."""

    def new_matcher(self, grammar: str) -> Any: ...

    def fill_masks(self, matchers: Sequence[Any], words: npt.NDArray[np.uint32]) -> None:
        """words[M, ceil(V / 32)]: a bit per token that may come next, low bits first."""
        ...

    def accept(self, matcher: Any, token_id: int) -> bool:
        """Goes on by a token; whether the text is complete, so that nothing may follow."""
        ...


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks that are being filled."""

    rows: Int32Array
    words: npt.NDArray[np.uint32]
    filled: Future[None]

    def wait(self) -> TokenMasks:
        self.filled.result()
        return TokenMasks(self.rows, self.words)


class GrammarMasks:
    """The matchers of every sequence that has a grammar and has not completed it."""

    def __init__(self, grammars: Grammars | None, vocab_size: int) -> None:
        self._grammars = grammars
        self._num_words = -(-vocab_size // 32)
        self._matchers: dict[int, Any] = {}
        self._executor: ThreadPoolExecutor | None = None

    def add(self, slot: int, grammar: str) -> None:
        assert self._grammars is not None, "this engine was made without grammars"
        self._matchers[slot] = self._grammars.new_matcher(grammar)

    def forget(self, slot: int) -> None:
        self._matchers.pop(slot, None)

    def start(self, slots: list[int]) -> PendingMasks | None:
        """Begins to fill the masks of the rows of these slots that have a grammar; None where no row has."""
        if not self._matchers:
            return None
        rows = [row for row, slot in enumerate(slots) if slot in self._matchers]
        if not rows:
            return None
        assert self._grammars is not None
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "ropeway-masks")
        words = np.zeros((len(rows), self._num_words), dtype=np.uint32)
        matchers = [self._matchers[slots[row]] for row in rows]
        filled = self._executor.submit(self._grammars.fill_masks, matchers, words)
        return PendingMasks(np.array(rows, dtype=np.int32), words, filled)

    def accept(self, rows: Int32Array, slots: list[int], samples: Draws) -> list[int]:
        """Goes on by the tokens drawn by the rows that have masks; those whose text is complete with them."""
        assert self._grammars is not None
        complete = []
        token_ids, is_failed = samples.token_ids, samples.is_failed
        for row in rows.tolist():
            slot = slots[row]
            if is_failed[row]:
                continue
            if self._grammars.accept(self._matchers[slot], int(token_ids[row])):
                del self._matchers[slot]
                complete.append(row)
        return complete


def with_masks(batch: SampleBatch, masks: TokenMasks) -> SampleBatch:
    """The batch bound to grammars. Where a grammar allows nothing but banned tokens, that row's bans give way: what an
    answer must be comes before what it should not hold, and a row with nothing to draw would fail.
    """
    starts, ends = batch.banned_indptr[masks.rows], batch.banned_indptr[masks.rows + 1]
    # A ban clears one word at most, so most rows need no closer look; one takes some 10 us.
    is_doubtful = (ends > starts) & (np.count_nonzero(masks.words, axis=1) <= ends - starts)
    if not is_doubtful.any():
        return replace(batch, masks=masks)
    is_kept = np.ones(len(batch.banned_ids), dtype=np.bool_)
    for number in np.flatnonzero(is_doubtful).tolist():
        allowed = masks.words[number].copy()
        own = slice(starts[number], ends[number])
        ids = batch.banned_ids[own]
        np.bitwise_and.at(allowed, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
        is_kept[own] = allowed.any()
    num_kept = np.concatenate([[0], np.cumsum(is_kept)])
    indptr = num_kept[batch.banned_indptr].astype(np.int32)
    return replace(batch, masks=masks, banned_indptr=indptr, banned_ids=batch.banned_ids[is_kept])
