"""Log-probabilities of prompt tokens: which rows of logits they need in a step, and which have been reported.

Keyed by the runner's slots. A position is scored once, also where preemption makes its prompt run again. Knows arrays;
knows nothing of scheduling or text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ropeway._native import RowStore, StepRows
from ropeway.backends.batch import Int32Array, Logprobs, ScoreBatch
from ropeway.core.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DueScores:
    """What one step scores: out_rows[L] are indices into its tokens, ascending; token_ids[L] what follows each.

    slots: (slot, scores of it), in the order of the rows. num_top: the most alternatives that one of them asks for.
    """

    out_rows: Int32Array
    token_ids: Int32Array
    slots: tuple[tuple[int, int], ...]
    num_top: int

    def batch(self, out_rows: Int32Array) -> ScoreBatch:
        """The same over logits of out_rows, which hold these."""
        rows = np.searchsorted(out_rows, self.out_rows).astype(np.int32)
        return ScoreBatch(rows, self.token_ids, self.num_top)


@dataclass(slots=True)
class _Open:
    sequence_id: int
    num_prompt_tokens: int
    num_top: int
    next_position: int  # of the prompt token to be scored next


class PromptScores:
    """The sequences whose prompts are to be scored."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}

    def add(self, slot: int, sequence_id: int, num_prompt_tokens: int, num_top: int) -> None:
        self._open[slot] = _Open(sequence_id, num_prompt_tokens, num_top, next_position=1)

    def forget(self, slot: int) -> None:
        self._open.pop(slot, None)

    def due(self, batch: StepRows, slots: list[int], store: RowStore) -> DueScores | None:
        """What a step whose rows are in these slots can score; None where it is nothing."""
        if self._open.keys().isdisjoint(slots):
            return None
        tokens, query_indptr, positions = store.token_rows, batch.query_indptr, batch.positions
        out_rows, token_ids, counts, num_tops = [], [], [], []
        is_partial = batch.layer_slice is not None and not batch.layer_slice.is_last
        for row, slot in enumerate(slots[: len(slots) - is_partial]):
            wanted = self._open.get(slot)
            if wanted is None:
                continue
            begin, end = int(query_indptr[row]), int(query_indptr[row + 1])
            start = int(positions[begin])
            first = max(start, wanted.next_position - 1)
            stop = min(start + end - begin, wanted.num_prompt_tokens - 1)
            if first < stop:
                out_rows.append(np.arange(begin + first - start, begin + stop - start, dtype=np.int32))
                token_ids.append(tokens[slot, first + 1 : stop + 1])
                counts.append((slot, stop - first))
                num_tops.append(wanted.num_top)
        if not counts:
            return None
        return DueScores(np.concatenate(out_rows), np.concatenate(token_ids), tuple(counts), max(num_tops))

    def take(self, due: DueScores, scores: Logprobs) -> dict[int, tuple[TokenLogprobs, ...]]:
        """The scores of `due` by sequence id; their positions are not due again."""
        found, first = {}, 0
        for slot, count in due.slots:
            wanted = self._open[slot]
            rows = range(first, first + count)
            found[wanted.sequence_id] = tuple(as_tuples(due.token_ids, scores, rows, [wanted.num_top] * count))
            wanted.next_position += count
            first += count
        return found


def as_tuples(token_ids: Int32Array, scores: Logprobs, rows: range, num_tops: list[int]) -> list[TokenLogprobs]:
    """Rows of `scores` as messages, the i-th with its first num_tops[i] alternatives; token_ids[L] are of all rows."""
    columns = zip(
        token_ids[rows.start : rows.stop].tolist(),
        scores.logprobs[rows.start : rows.stop].tolist(),
        scores.ranks[rows.start : rows.stop].tolist(),
        scores.top_ids[rows.start : rows.stop].tolist(),
        scores.top_logprobs[rows.start : rows.stop].tolist(),
        num_tops,
        strict=True,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(ids[:num_top]), tuple(values[:num_top]))
        for token_id, logprob, rank, ids, values, num_top in columns
    ]
