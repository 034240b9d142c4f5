"""The two service classes above every policy: interactive, and background, which takes what is left over.

Owns the order over both. Knows no memory and no budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ropeway.core.policy import FirstComeFirstServed, Key, Policy
from ropeway.core.sequence import Sequence


class WaitingLine:
    """Those who wait, in two classes, each under a policy of its own.

    make_policy: a new policy for a class.
    """

    def __init__(self, make_policy: Callable[[], Policy] = FirstComeFirstServed) -> None:
        self._interactive = make_policy()
        self._background = make_policy()

    def __len__(self) -> int:
        return len(self._interactive) + len(self._background)

    def push(self, sequence: Sequence, now_s: float) -> None:
        """A new or preempted sequence takes its place."""
        self._policy_of(sequence).push(sequence, now_s)

    def remove(self, sequence: Sequence) -> None:
        """A waiting sequence ends."""
        self._policy_of(sequence).remove(sequence)

    def first(self) -> Sequence | None:
        """Who boards next."""
        return self._interactive.first() or self._background.first()

    def pop(self) -> Sequence:
        """The first boards."""
        return (self._interactive if len(self._interactive) else self._background).pop()

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
        for sequence in waiting:
            classes[sequence.request.terms.is_background].append(sequence)
        self._interactive.check_invariants(classes[False])
        self._background.check_invariants(classes[True])

    def _policy_of(self, sequence: Sequence) -> Policy:
        return self._background if sequence.request.terms.is_background else self._interactive
