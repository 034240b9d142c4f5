"""Sequences put aside because another is computing what they would compute too. Knows no memory, policies or budgets.

A sequence waits only for one that runs and is ahead of it in policy order, which therefore advances or leaves; either
ends the wait. So nobody waits in a circle, and nobody waits for one that is behind.
"""

from __future__ import annotations

from collections.abc import Iterator

from ropeway.core.sequence import Sequence, SequenceState

MAX_NUM_DEFERRED = 64  # each is looked at in every plan; those behind them wait in line instead


class Deferrals:
    """Who waits for whom.

    It is over when the leader has published the blocks that both have, or does not run any more.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Sequence, Sequence, int]] = {}  # sequence id -> sequence, leader, blocks

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([sequence for sequence, _, _ in self._entries.values()])

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._entries

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= MAX_NUM_DEFERRED

    def add(self, sequence: Sequence, leader: Sequence, num_blocks: int) -> None:
        """Put a sequence aside until `leader` has published `num_blocks` blocks of its table."""
        assert sequence is not leader and leader.state is SequenceState.RUNNING, "only one that runs can be waited for"
        self._entries[sequence.sequence_id] = (sequence, leader, num_blocks)

    def remove(self, sequence: Sequence) -> None:
        del self._entries[sequence.sequence_id]

    def pop_ready(self) -> list[Sequence]:
        """Those whose wait is over; they are not put aside any more."""
        ready = [
            sequence
            for sequence, leader, num_blocks in self._entries.values()
            if leader.state is not SequenceState.RUNNING or leader.num_published_blocks >= num_blocks
        ]
        for sequence in ready:
            self.remove(sequence)
        return ready
