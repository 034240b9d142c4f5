"""The two service classes above every policy: interactive, and background, which takes what is left over.

Owns the order over both. Knows no memory and no budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ropeway.core.deferral import Deferrals
from ropeway.core.policy import FirstComeFirstServed, Key, Policy
from ropeway.core.sequence import Sequence


class WaitingLine:
    """Those who wait, in two classes, each under a policy of its own.

    make_policy: a new policy for a class.
    """

    def __init__(self, make_policy: Callable[[], Policy] = FirstComeFirstServed) -> None:
        self._interactive = make_policy()
        self._background = make_policy()
        self._deferred = Deferrals()

    def __len__(self) -> int:
        return len(self._interactive) + len(self._background) + len(self._deferred)

    def push(self, sequence: Sequence, now_s: float) -> None:
        """A new or preempted sequence takes its place."""
        self._policy_of(sequence).push(sequence, now_s)

    def remove(self, sequence: Sequence) -> None:
        """A waiting sequence ends."""
        (self._deferred if sequence in self._deferred else self._policy_of(sequence)).remove(sequence)

    def defer(self, leader: Sequence, num_blocks: int) -> bool:
        """The first lets others pass until `leader` has published `num_blocks` blocks. False where too many do so."""
        if self._deferred.is_full:
            return False
        self._deferred.add(self.pop(), leader, num_blocks)
        return True

    def first(self) -> Sequence | None:
        """Who boards next. Those who let others pass were ahead of the rest of their class."""
        first = self._interactive.first() or self._background.first()
        back = self._deferred.first() if self._deferred else None
        if back is None or (first is not None and _is_background(back) > _is_background(first)):
            return first
        return back

    def pop(self) -> Sequence:
        """The first boards."""
        sequence = self.first()
        assert sequence is not None, "nobody waits"
        if sequence not in self._deferred:
            return self._policy_of(sequence).pop()
        self._deferred.remove(sequence)
        return sequence

    def key(self, sequence: Sequence) -> Key:
        """The place of a running sequence; the smallest comes first."""
        return (sequence.request.terms.is_background, *self._policy_of(sequence).key(sequence))

    def on_planned(self, decoding: list[Sequence]) -> None:
        """Each of these computes one new token in this step."""
        self._interactive.on_planned(decoding)

    def on_finished(self, sequence: Sequence) -> None:
        """A sequence ended, after it left the line or the batch."""
        self._policy_of(sequence).on_finished(sequence)

    def victims_for(self, newcomer: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """Those running that the first of the line may take the place of, the last of the order first."""
        return self._policy_of(newcomer).victims_for(newcomer, running)

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """Check that exactly `waiting` wait, in order. Raises AssertionError with the first violation."""
        classes: tuple[list[Sequence], list[Sequence]] = ([], [])
        deferred = list(self._deferred)
        for sequence in waiting:
            if sequence in deferred:
                deferred.remove(sequence)
                continue
            classes[sequence.request.terms.is_background].append(sequence)
        assert not deferred, "one that does not wait lets others pass"
        self._interactive.check_invariants(classes[False])
        self._background.check_invariants(classes[True])

    def _policy_of(self, sequence: Sequence) -> Policy:
        return self._background if _is_background(sequence) else self._interactive


def _is_background(sequence: Sequence) -> bool:
    return sequence.request.terms.is_background
