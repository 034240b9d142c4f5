"""Deadlines: when a request is out of time, and that what has ended is forgotten."""

from __future__ import annotations

from ropeway.core.deadlines import MIN_HEAP_SIZE, Deadlines
from ropeway.core.params import ServiceTerms, Timeout
from ropeway.core.sequence import Sequence, SequenceState
from support.scheduling import make_request


def arrived(
    arrival_s: float, *, n: int = 1, timeout_s: float | None = None, queue_timeout_s: float | None = None
) -> tuple[Sequence, ...]:
    terms = ServiceTerms(timeout_s=timeout_s, queue_timeout_s=queue_timeout_s)
    request = make_request("a", 4, 4, n=n, terms=terms)
    return tuple(Sequence(i, request, i, arrival_s) for i in range(n))


def due(deadlines: Deadlines, now_s: float) -> list[tuple[Timeout, Sequence]]:
    return [(timeout, sequences[0]) for timeout, sequences in deadlines.pop_due(now_s)]


def test_moments_come_once_in_order_of_time() -> None:
    deadlines = Deadlines()
    late, soon, never = arrived(1.0, timeout_s=9.0), arrived(2.0, timeout_s=3.0), arrived(0.0)
    for sequences in (late, soon, never):
        deadlines.add(sequences)
    assert due(deadlines, 4.999) == []
    assert due(deadlines, 5.0) == [("request", soon[0])]
    assert due(deadlines, 100.0) == [("request", late[0])]
    assert due(deadlines, 1e9) == []


def test_a_request_that_has_begun_kept_its_queue_deadline() -> None:
    deadlines = Deadlines()
    waiting, begun = arrived(0.0, queue_timeout_s=1.0), arrived(0.0, n=2, queue_timeout_s=1.0, timeout_s=2.0)
    deadlines.add(waiting)
    deadlines.add(begun)
    begun[0].state = SequenceState.PREEMPTED  # it ran, and its sibling never did
    assert due(deadlines, 1.0) == [("queue", waiting[0])]
    assert due(deadlines, 2.0) == [("request", begun[0])]


def test_what_has_ended_is_left_out_and_does_not_pile_up() -> None:
    deadlines = Deadlines()
    for _ in range(100 * MIN_HEAP_SIZE):
        sequences = arrived(0.0, timeout_s=1e6)
        deadlines.add(sequences)
        sequences[0].finish_reason = "stop"
    assert len(deadlines) <= 4 * MIN_HEAP_SIZE
    assert due(deadlines, 1e9) == []
