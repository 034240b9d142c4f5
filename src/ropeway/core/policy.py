"""Who comes first, within one service class. Knows no memory and no budgets.

A policy owns the line of those who wait and orders those who run: in that order prefills are computed, and from its end
sequences are preempted. The first of the order is preempted only for one ahead of it, so somebody always finishes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Protocol

from ropeway.core.sequence import Sequence
from ropeway.errors import ConfigError

Key = tuple[float, ...]

_by_rank = attrgetter("rank")

SPF_S_PER_TOKEN = 0.01  # about ten times what computing a token of a prompt takes
SPF_MAX_HANDICAP_S = 60.0


class Policy(Protocol):
    """What the scheduler asks of a policy. Joining, leaving and boarding cost O(log n) of those who wait."""

    def __len__(self) -> int:
        """How many wait."""

    def push(self, sequence: Sequence, now_s: float) -> None:
        """A new sequence joins the line; one that was preempted, or let others pass, returns to its place in it."""

    def remove(self, sequence: Sequence) -> None:
        """A waiting sequence leaves the line without boarding."""

    def first(self) -> Sequence | None:
        """Who boards next."""

    def pop(self) -> Sequence:
        """The first of the line boards."""

    def key(self, sequence: Sequence) -> Key:
        """The place of a running sequence, or of the first of the line among them; the smallest comes first."""

    def goes_first(self, sequence: Sequence) -> bool:
        """Whether its prompt is not to be held up by those of others."""

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those running by their keys, the smallest first."""

    def on_boarded(self, sequence: Sequence) -> None:
        """It runs, and will compute its tokens from num_computed_tokens on."""

    def on_decoding(self, sequence: Sequence) -> None:
        """Its prompt is planned: from the next step on it decodes, until it is pushed back into the line or ends."""

    def on_planned(self) -> None:
        """Each of those who decode computes one new token in this step."""

    def on_finished(self, sequence: Sequence) -> None:
        """A sequence ended, after it left the line or the batch."""

    def victims_for(self, newcomer: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """Those running that the first of the line may take the place of, the last of the order first."""

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """Check that the line holds exactly `waiting`, in order. Raises AssertionError with the first violation."""


class RankedLine:
    """Sequences that wait, by rank: a heap; entries of those removed are dropped as they come up, or outnumber it."""

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._heap: list[tuple[tuple[float, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        assert sequence.sequence_id not in self._members, f"sequence {sequence.sequence_id} waits twice"
        self._members[sequence.sequence_id] = sequence
        heappush(self._heap, (sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        del self._members[sequence.sequence_id]
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [(s.rank, s) for s in self._members.values()]
            heapify(self._heap)

    def first(self) -> Sequence | None:
        heap, members = self._heap, self._members
        while heap and heap[0][1].sequence_id not in members:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        sequence = self.first()
        assert sequence is not None, "nobody waits"
        heappop(self._heap)
        del self._members[sequence.sequence_id]
        return sequence

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """Check that these wait here, nobody else, each with one entry. Raises AssertionError."""
        assert {s.sequence_id: s for s in waiting} == self._members, "the line and the waiting differ"
        live_ids = [s.sequence_id for _, s in self._heap if s.sequence_id in self._members]
        assert sorted(live_ids) == sorted(self._members), "the line has lost an entry, or has one twice"
        assert all(s.rank == rank for rank, s in self._heap if s.sequence_id in self._members), "a rank has changed"
        assert all(self._heap[(i - 1) // 2] < self._heap[i] for i in range(1, len(self._heap))), "out of policy order"


class FirstComeFirstServed:
    """In order of arrival. A preempted sequence keeps its place; nobody who runs makes way for a newcomer.

    Other policies with an order that never changes are this one with another `rank`.
    """

    def __init__(self) -> None:
        self._line = RankedLine()

    def __len__(self) -> int:
        return len(self._line)

    def rank(self, sequence: Sequence) -> float:
        """Where a new sequence stands; smaller is sooner, and ties go by arrival."""
        return 0.0

    def push(self, sequence: Sequence, now_s: float) -> None:
        if not sequence.num_preemptions:
            sequence.rank = (self.rank(sequence), sequence.sequence_id)
        self._line.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._line.remove(sequence)

    def first(self) -> Sequence | None:
        return self._line.first()

    def pop(self) -> Sequence:
        return self._line.pop()

    def key(self, sequence: Sequence) -> Key:
        return sequence.rank

    def goes_first(self, sequence: Sequence) -> bool:
        return False

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        return sorted(running, key=_by_rank)

    def on_boarded(self, sequence: Sequence) -> None:
        pass

    def on_decoding(self, sequence: Sequence) -> None:
        pass

    def on_planned(self) -> None:
        pass

    def on_finished(self, sequence: Sequence) -> None:
        pass

    def victims_for(self, newcomer: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        return []

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        self._line.check_invariants(waiting)


class PriorityOrder(FirstComeFirstServed):
    """Lower priorities first, and among equals in order of arrival; one that is lower may take the place of another.

    aging_s: seconds of waiting that outweigh one step of priority, so nobody is overtaken by what arrives more than
    priority x aging_s later; 0 never lets anything outweigh it, and then a stream of low numbers starves the rest.

    Raises ConfigError for a negative aging_s.
    """

    def __init__(self, aging_s: float) -> None:
        super().__init__()
        if aging_s < 0:
            raise ConfigError(f"priority_aging_s must be at least 0 seconds, not {aging_s:g}")
        self._aging_s = aging_s
        self._running: list[Sequence] = []  # by rank

    def rank(self, sequence: Sequence) -> float:
        priority = sequence.request.terms.priority
        return sequence.arrival_s + priority * self._aging_s if self._aging_s else float(priority)

    def push(self, sequence: Sequence, now_s: float) -> None:
        if sequence.num_preemptions:
            self._discard_running(sequence)
        super().push(sequence, now_s)

    def on_boarded(self, sequence: Sequence) -> None:
        insort(self._running, sequence, key=_by_rank)

    def on_finished(self, sequence: Sequence) -> None:
        self._discard_running(sequence)

    def victims_for(self, newcomer: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        rank, priority = newcomer.rank, newcomer.request.terms.priority
        if not self._running or self._running[-1].rank < rank:  # as in most steps: the line is in this order too
            return []
        victims = [s for s in running if s.rank > rank and s.request.terms.priority > priority]
        victims = self.in_order(victims)
        victims.reverse()
        return victims

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        super().check_invariants(waiting)
        assert self._running == sorted(self._running, key=_by_rank), "those who run are out of order"
        assert all([s.block_ids for s in self._running]), "one that does not run counts as running"

    def _discard_running(self, sequence: Sequence) -> None:
        i = bisect_left(self._running, sequence.rank, key=_by_rank)
        if self._running[i : i + 1] == [sequence]:
            del self._running[i]


class ShortestPrefillFirst(FirstComeFirstServed):
    """The shortest prompt first, with ageing: a token more counts as SPF_S_PER_TOKEN of waiting less.

    So nobody is overtaken by what arrives more than SPF_MAX_HANDICAP_S later, however long its prompt.
    """

    def rank(self, sequence: Sequence) -> float:
        return sequence.arrival_s + min(SPF_S_PER_TOKEN * sequence.num_prefill_tokens, SPF_MAX_HANDICAP_S)
