"""Which samples of requests with n > 1 may join the line. Knows no memory, budgets or policies.

A request is one, however many samples it asks for: beside others its samples take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ropeway.core.sequence import Sequence


class SampleTurns:
    """Of each request one sample is under way, in line or running, from its arrival until the last has ended; the
    others are held back until there is room for extra ones, first come first served, or their turn comes.

    Background samples are never held: they make way for others anyhow.

    num_single: requests with n = 1 that are unfinished. num_shared: others that are. Background ones count in neither.
    num_held, num_held_tokens: samples held back, and the tokens of their prompts.
    """

    def __init__(self) -> None:
        self.num_single = 0
        self._num_under_way: dict[str, int] = {}  # request id -> samples that have joined and not ended
        self._held: dict[str, deque[Sequence]] = {}
        self._due: dict[str, None] = {}  # requests with none under way and some held, in order
        self.num_held = 0
        self.num_held_tokens = 0
        self._num_extra = 0  # under way, beyond the first of each request

    @property
    def num_shared(self) -> int:
        return len(self._num_under_way)

    def is_held(self, sequence: Sequence) -> bool:
        return sequence in self._held.get(sequence.request_id, ())

    def add(self, sequences: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """The sequences of a new request; those that join the line now."""
        request = sequences[0].request
        if request.terms.is_background:
            return sequences
        if len(sequences) == 1:
            self.num_single += 1
            return sequences
        self._num_under_way[request.request_id] = 1
        self._held[request.request_id] = deque(sequences[1:])
        for sequence in sequences[1:]:
            self._count_held(sequence, 1)
        return sequences[:1]

    def release(self, num_extra: int) -> list[Sequence]:
        """Those that join the line now, where so many samples beyond the first of each request may be under way."""
        released = [self._release(request_id) for request_id in list(self._due)]
        while self._held and self._num_extra < num_extra:
            self._num_extra += 1
            released.append(self._release(next(iter(self._held))))
        return released

    def discard(self, sequence: Sequence) -> bool:
        """A sequence ended; whether it was held back."""
        request_id = sequence.request_id
        if sequence.request.terms.is_background:
            return False
        if request_id not in self._num_under_way:
            self.num_single -= 1
            return False
        was_held = self.is_held(sequence)
        if was_held:
            self._held[request_id].remove(sequence)
            self._count_held(sequence, -1)
        else:
            self._num_under_way[request_id] -= 1
            self._num_extra -= self._num_under_way[request_id] > 0
        if not self._num_under_way[request_id]:
            if request_id in self._held:
                self._due[request_id] = None
            else:
                del self._num_under_way[request_id]
                self._due.pop(request_id, None)
        return was_held

    def check_invariants(self, unfinished: Iterable[Sequence]) -> None:
        """Check that every sample of an unfinished request is counted where it is. Raises AssertionError."""
        unfinished = [s for s in unfinished if not s.request.terms.is_background]
        shared = [s for s in unfinished if s.request.params.n > 1]
        assert self.num_single == len(unfinished) - len(shared), "requests of one sample miscounted"
        held = [s for samples in self._held.values() for s in samples]
        assert len(held) == self.num_held and all([s in shared for s in held]), "held samples miscounted"
        assert self.num_held_tokens == sum(s.num_prompt_tokens for s in held), "tokens held back miscounted"
        assert all(self._held.values()), "a request holds back nobody"
        under_way = dict.fromkeys([s.request_id for s in shared], 0)
        for sequence in shared:
            under_way[sequence.request_id] += sequence not in held
        assert under_way == self._num_under_way, "samples under way miscounted"
        due = [request_id for request_id, num in under_way.items() if not num]
        assert sorted(due) == sorted(self._due), "a request with none under way has no turn, or another has"
        assert self._num_extra == sum(max(0, num - 1) for num in under_way.values()), "extra samples miscounted"

    def _release(self, request_id: str) -> Sequence:
        sequence = self._held[request_id].popleft()
        self._count_held(sequence, -1)
        self._due.pop(request_id, None)
        self._num_under_way[request_id] += 1
        return sequence

    def _count_held(self, sequence: Sequence, sign: int) -> None:
        """A sequence is held (1), or is so no longer (-1)."""
        self.num_held += sign
        self.num_held_tokens += sign * sequence.num_prompt_tokens
        if not self._held[sequence.request_id]:
            del self._held[sequence.request_id]
