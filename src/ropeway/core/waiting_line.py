"""The two service classes above every policy: interactive, and background, which takes what is left over.

Owns the order over both. Knows no memory and no budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ropeway.core.deferral import Deferrals
from ropeway.core.policy import FirstComeFirstServed, Key, Policy
from ropeway.core.sequence import Sequence
from ropeway.errors import ConfigError

# Background work is served its share in pieces of so many tokens, so that what it displaces is displaced rarely.
SHARE_QUANTUM_TOKENS = 256.0


class WaitingLine:
    """Those who wait, in two classes, each under a policy of its own.

    make_policy: a new policy for a class. background_share: of the tokens computed for the first time while background
    sequences are unfinished, the part that is guaranteed to them as far as they can use it, 0 to 0.9.

    Interactive sequences come first: background ones board only where no interactive one waits, make way for those that
    do, and are preempted first. Meanwhile they earn background_share of what is computed; once they have earned
    SHARE_QUANTUM_TOKENS they are due, and come first until they have had them. Neither class then loses what it gains:
    only tokens computed for the first time count, on both sides. With a share of 0 they can starve.

    Raises ConfigError for a share out of range.
    """

    def __init__(
        self, make_policy: Callable[[], Policy] = FirstComeFirstServed, *, background_share: float = 0.05
    ) -> None:
        if not 0 <= background_share <= 0.9:
            raise ConfigError(f"background_share must be from 0 to 0.9, not {background_share:g}")
        self._interactive = make_policy()
        self._background = make_policy()
        self._deferred = Deferrals()
        self.entitled: Sequence | None = None  # others were preempted for it: it stays the first, whatever changes
        self._num_background = 0  # unfinished
        self._decoding_ids: tuple[set[int], set[int]] = (set(), set())  # of either class
        self._earned_per_token = background_share / (1 - background_share)
        self._num_owed_tokens = 0.0  # to the background
        self._is_background_due = False

    def __len__(self) -> int:
        return len(self._interactive) + len(self._background) + len(self._deferred) + (self.entitled is not None)

    def push(self, sequence: Sequence, now_s: float) -> None:
        """A new or preempted sequence takes its place."""
        self._num_background += _is_background(sequence) and not sequence.num_preemptions
        self._decoding_ids[_is_background(sequence)].discard(sequence.sequence_id)
        self._policy_of(sequence).push(sequence, now_s)

    def remove(self, sequence: Sequence) -> None:
        """A waiting sequence ends."""
        if sequence is self.entitled:
            self.entitled = None
        else:
            (self._deferred if sequence in self._deferred else self._policy_of(sequence)).remove(sequence)

    def entitle(self) -> None:
        """Others are preempted for the first, and nobody passes it until it has boarded."""
        if self.entitled is None:
            self.entitled = self.pop()

    def defer(self, leader: Sequence, num_blocks: int) -> bool:
        """The first lets others pass until `leader` has published `num_blocks` blocks. False where too many do so."""
        if self._deferred.is_full:
            return False
        self._deferred.add(self.pop(), leader, num_blocks)
        return True

    def begin_step(self, now_s: float) -> None:
        """Settle which class comes first in the step being planned; who let others pass is back where it stood."""
        for sequence in self._deferred.pop_ready():
            self._policy_of(sequence).push(sequence, now_s)
        if not self._num_background:
            self._num_owed_tokens, self._is_background_due = 0.0, False
        elif self._num_owed_tokens >= SHARE_QUANTUM_TOKENS:
            self._is_background_due = True
        elif self._num_owed_tokens <= 0:
            self._is_background_due = False

    def first(self) -> Sequence | None:
        """Who boards next."""
        if self.entitled is not None:
            return self.entitled
        first = self._interactive.first()
        if self._num_background and (first is None or self._is_background_due):
            first = self._background.first() or first
        return first

    def first_interactive(self) -> Sequence | None:
        """Of those that are no background work, who boards next."""
        if self.entitled is not None and not _is_background(self.entitled):
            return self.entitled
        return self._interactive.first()

    def pop(self) -> Sequence:
        """The first boards."""
        sequence = self.first()
        assert sequence is not None, "nobody waits"
        if sequence is self.entitled:
            self.entitled = None
            return sequence
        return self._policy_of(sequence).pop()

    def key(self, sequence: Sequence) -> Key:
        """The place of a running sequence, or of the first of the line among them; the smallest comes first."""
        return (self._class_rank(sequence), *self._policy_of(sequence).key(sequence))

    def goes_first(self, sequence: Sequence) -> bool:
        """Whether its prompt is not to be held up by those of others."""
        return self._policy_of(sequence).goes_first(sequence)

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those running, the first of the order first."""
        if not self._num_background:
            return self._interactive.in_order(running)
        classes = self._by_class(running)
        interactive, background = self._interactive.in_order(classes[False]), self._background.in_order(classes[True])
        return [*background, *interactive] if self._is_background_due else [*interactive, *background]

    def on_boarded(self, sequence: Sequence) -> None:
        """It runs, and will compute its tokens from num_computed_tokens on."""
        self._policy_of(sequence).on_boarded(sequence)

    def on_decoding(self, sequence: Sequence) -> None:
        """Its prompt is planned: from the next step on it decodes."""
        self._decoding_ids[_is_background(sequence)].add(sequence.sequence_id)
        self._policy_of(sequence).on_decoding(sequence)

    def on_planned(self) -> None:
        """Each of those who decode computes one new token in this step."""
        self._interactive.on_planned()
        self._background.on_planned()
        if self._num_background:
            self._count(*map(len, self._decoding_ids))

    def on_prefilled(self, sequence: Sequence, num_new_tokens: int) -> None:
        """It computes so many tokens of its prompt for the first time in this step."""
        if self._num_background:
            is_background = _is_background(sequence)
            self._count(num_new_tokens * (not is_background), num_new_tokens * is_background)

    def on_finished(self, sequence: Sequence) -> None:
        """A sequence ended, after it left the line or the batch."""
        self._num_background -= _is_background(sequence)
        self._decoding_ids[_is_background(sequence)].discard(sequence.sequence_id)
        self._policy_of(sequence).on_finished(sequence)

    def victims_for(self, newcomer: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """Those running that the first of the line may take the place of, the last of the order first."""
        is_background = _is_background(newcomer)
        if not self._num_background:
            return self._interactive.victims_for(newcomer, running)
        classes = self._by_class(running)
        victims = self._policy_of(newcomer).victims_for(newcomer, classes[is_background])
        if is_background or self._is_background_due:
            return victims
        return [*reversed(self._background.in_order(classes[True])), *victims]

    def check_invariants(self, waiting: list[Sequence]) -> None:
        """Check that exactly `waiting` wait, in order. Raises AssertionError with the first violation."""
        classes: tuple[list[Sequence], list[Sequence]] = ([], [])
        deferred = list(self._deferred)
        for sequence in waiting:
            if sequence in deferred:
                deferred.remove(sequence)
            elif sequence is not self.entitled:
                classes[sequence.request.terms.is_background].append(sequence)
        assert not deferred, "one that does not wait lets others pass"
        assert self.entitled is None or self.entitled in waiting, "one that does not wait is entitled to board"
        self._interactive.check_invariants(classes[False])
        self._background.check_invariants(classes[True])

    def _count(self, num_interactive: int, num_background: int) -> None:
        """New tokens of a step. What was left over is set against what is owed, and makes no debt."""
        owed = self._num_owed_tokens - num_background
        if not self._is_background_due:
            owed = max(owed, min(self._num_owed_tokens, 0.0))
        self._num_owed_tokens = min(owed + num_interactive * self._earned_per_token, SHARE_QUANTUM_TOKENS)

    def _by_class(self, running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        classes: tuple[list[Sequence], list[Sequence]] = ([], [])
        for sequence in running:
            classes[_is_background(sequence)].append(sequence)
        return classes

    def _class_rank(self, sequence: Sequence) -> bool:
        return _is_background(sequence) is not self._is_background_due

    def _policy_of(self, sequence: Sequence) -> Policy:
        return self._background if _is_background(sequence) else self._interactive


def _is_background(sequence: Sequence) -> bool:
    return sequence.request.terms.is_background
