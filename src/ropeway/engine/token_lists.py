"""Biased and banned token ids of the few sequences that have any, gathered into the columns of a SampleBatch.

Keyed by the runner's slots. Knows arrays; knows nothing of scheduling or text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropeway._native import RowStore, StepRows
from ropeway.backends.batch import Int32Array
from ropeway.core.params import Request

NO_IDS = np.zeros(0, dtype=np.int32)
_NO_VALUES = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class TokenListColumns:
    """The columns of these names in a SampleBatch."""

    bias_indptr: Int32Array
    bias_ids: Int32Array
    bias_values: npt.NDArray[np.float32]
    banned_indptr: Int32Array
    banned_ids: Int32Array


@dataclass(frozen=True, slots=True)
class _Lists:
    """stop_token_ids are banned while fewer than min_tokens were generated; the last id of each of bad_words while the
    output ends with its others.
    """

    bias_ids: Int32Array
    bias_values: npt.NDArray[np.float32]
    stop_token_ids: Int32Array
    min_tokens: int
    bad_words: tuple[Int32Array, ...]

    def banned_ids(self, output: Int32Array) -> Int32Array:
        """Ids that must not follow `output`."""
        banned = self.stop_token_ids if len(output) < self.min_tokens else NO_IDS
        last_ids = [
            word[-1:]
            for word in self.bad_words
            if len(word) <= len(output) + 1 and np.array_equal(output[len(output) - len(word) + 1 :], word[:-1])
        ]
        return np.concatenate([banned, *last_ids]) if last_ids else banned


class TokenLists:
    """The lists of every sequence that has some."""

    def __init__(self) -> None:
        self._lists: dict[int, _Lists] = {}

    def add(self, slot: int, request: Request) -> None:
        """Takes in a request's lists, where it has any."""
        params = request.params
        if not (params.logit_bias or request.bad_words or (params.min_tokens and request.stop_token_ids)):
            return
        bias = params.logit_bias or {}
        self._lists[slot] = _Lists(
            bias_ids=np.array(list(bias.keys()), dtype=np.int32),
            bias_values=np.array(list(bias.values()), dtype=np.float32),
            stop_token_ids=np.array(sorted(request.stop_token_ids), dtype=np.int32),
            min_tokens=params.min_tokens,
            bad_words=tuple(np.array(word, dtype=np.int32) for word in request.bad_words),
        )

    def forget(self, slot: int) -> None:
        self._lists.pop(slot, None)

    def has_any(self, slots: list[int]) -> bool:
        return bool(self._lists) and not self._lists.keys().isdisjoint(slots)

    def columns(self, rows: StepRows, slots: list[int], store: RowStore) -> TokenListColumns:
        """Of the rows that sample, which are in these slots."""
        tokens, num_prompt, num_tokens = store.token_rows, rows.num_prompt_tokens, rows.num_tokens
        biases: dict[int, Int32Array] = {}
        values: list[npt.NDArray[np.float32]] = []
        banned: dict[int, Int32Array] = {}
        for row, slot in enumerate(slots):
            entry = self._lists.get(slot)
            if entry is not None:
                biases[row] = entry.bias_ids
                values.append(entry.bias_values)
                banned[row] = entry.banned_ids(tokens[slot, num_prompt[row] : num_tokens[row]])
        bias_values = np.concatenate(values) if values else _NO_VALUES
        return TokenListColumns(*_csr(biases, len(slots)), bias_values, *_csr(banned, len(slots)))


def _csr(ids_by_row: dict[int, Int32Array], num_rows: int) -> tuple[Int32Array, Int32Array]:
    """Row offsets and concatenated ids, of rows in ascending order; rows that are not keys are empty."""
    indptr = np.zeros(num_rows + 1, dtype=np.int32)
    if not ids_by_row:
        return indptr, NO_IDS
    for row, ids in ids_by_row.items():
        indptr[row + 1] = len(ids)
    return np.cumsum(indptr, dtype=np.int32), np.concatenate(list(ids_by_row.values()))
