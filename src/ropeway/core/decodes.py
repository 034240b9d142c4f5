"""The sequences that decode: one row of one token each, at the head of every plan. Knows no budgets or policies.

Most tokens of most sequences change nothing but a count, so each sequence notes with how many tokens it has to be
looked at again, and a plan is made from those counts and from the few that need a block.
"""

from __future__ import annotations

from ropeway.core.kv_manager import KVManager
from ropeway.core.plan_builder import Granted
from ropeway.core.sequence import Sequence


class Decodes:
    """sequences: in the order in which they began to decode. lacking: of these, whose next token needs a block."""

    def __init__(self, kv: KVManager) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.lacking: dict[int, Sequence] = {}
        self._kv = kv

    def add(self, sequence: Sequence) -> None:
        """All of its known tokens are planned."""
        self.sequences[sequence.sequence_id] = sequence

    def discard(self, sequence: Sequence) -> bool:
        """It does not run any more; whether it was one of these."""
        self.lacking.pop(sequence.sequence_id, None)
        return self.sequences.pop(sequence.sequence_id, None) is not None

    def rows(self) -> tuple[list[int], list[int], list[Granted]]:
        """The id of each, the position of the token it computes next, and the blocks that the lacking get now.

        The caller has checked that these can be had.
        """
        sequences, lacking, granted = self.sequences, self.lacking, list[Granted]()
        if lacking:
            rows = [row for row, sequence_id in enumerate(sequences) if sequence_id in lacking]
            # Who lacks a block was found row by row too, so both are in the same order.
            granted = list(zip(rows, self._kv.grant_each(list(lacking.values())), strict=True))
            lacking.clear()
        return list(sequences), [s.num_tokens - 1 for s in sequences.values()], granted

    def attend(self, sequence: Sequence) -> None:
        """It got the token with which something is due: a block is full, or the next one is needed."""
        num_tokens = sequence.num_tokens
        if num_tokens == sequence.num_tokens_to_seal:
            self._kv.seal(sequence)
        if num_tokens > sequence.num_slots:
            self.lacking[sequence.sequence_id] = sequence
        sequence.num_tokens_to_attend = self._kv.num_tokens_to_attend(sequence)

    def check_invariants(self) -> None:
        """Check that whoever lacks a block is known. Raises AssertionError."""
        for sequence in self.sequences.values():
            lacks = sequence.num_tokens > sequence.num_slots
            assert lacks == (sequence.sequence_id in self.lacking), "a block is needed and not asked for, or reverse"
        assert self.lacking.keys() <= self.sequences.keys(), "one that does not decode lacks a block"
