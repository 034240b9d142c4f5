"""Which requests are out of time. Knows no clock, queues or memory.

A heap of moments; what has ended is dropped when its moment comes, or when the heap holds mostly such.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from ropeway.core.params import Timeout
from ropeway.core.sequence import Sequence, SequenceState

MIN_HEAP_SIZE = 64


class Deadlines:
    """The moments at which a request must have ended, and have begun. Each costs O(log n), once.

    A request counts as begun from its first step on, also while it is preempted.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timeout, tuple[Sequence, ...]]] = []
        self._num_added = 0  # orders equal moments
        self._num_alive_at_most = MIN_HEAP_SIZE

    def add(self, sequences: tuple[Sequence, ...]) -> None:
        """The sequences of a request that has just arrived."""
        terms, arrival_s = sequences[0].request.terms, sequences[0].arrival_s
        if terms.timeout_s is not None:
            self._push(arrival_s + terms.timeout_s, "request", sequences)
        if terms.queue_timeout_s is not None:
            self._push(arrival_s + terms.queue_timeout_s, "queue", sequences)

    def pop_due(self, now_s: float) -> list[tuple[Timeout, tuple[Sequence, ...]]]:
        """The requests whose moment has come, earliest first, each moment once; those that kept it are left out."""
        due: list[tuple[Timeout, tuple[Sequence, ...]]] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, timeout, sequences = heappop(self._heap)
            if _is_open(timeout, sequences):
                due.append((timeout, sequences))
        return due

    def _push(self, moment_s: float, timeout: Timeout, sequences: tuple[Sequence, ...]) -> None:
        if len(self._heap) >= 2 * self._num_alive_at_most:
            self._heap = [entry for entry in self._heap if _is_open(entry[2], entry[3])]
            heapify(self._heap)
            self._num_alive_at_most = max(len(self._heap), MIN_HEAP_SIZE)
        heappush(self._heap, (moment_s, self._num_added, timeout, sequences))
        self._num_added += 1

    def __len__(self) -> int:
        """Moments remembered; at most 4 x those still to be kept at the time of the last sorting out, or a few."""
        return len(self._heap)


def _is_open(timeout: Timeout, sequences: tuple[Sequence, ...]) -> bool:
    """Whether the moment is still to be kept."""
    if timeout == "queue":
        return all([s.state is SequenceState.WAITING for s in sequences])
    return any([s.finish_reason is None for s in sequences])
