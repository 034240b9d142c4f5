"""How many times as long as their decodes alone steps are planned to be. Knows no plans, queues or objectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tail:
    """One step in a hundred may take more than `limit` times what its decodes alone would.

    start: times that steps are planned to take at first; least, most: ever after. At the least prompts go on, however
    unpredictable steps are.
    """

    limit: float
    start: float
    least: float
    most: float


EXCEEDING_SHARE = 0.01
# Of what one step too long takes off. Beside 1, 8 and 32 answers prompts of 500 to 8,000 tokens make 3,000, 1,600 and
# 650 steps: time enough to find the factor, and too little for one slow spell to cost it.
GAIN = 0.06


class SteeredFactor:
    """Follows steps of decodes beside as much of a prompt as they have room for: grows a little with each within the
    limit and shrinks by 99 times as much with each beyond, so it rests where one in a hundred is beyond.

    What makes steps longer than planned, and what leaves them shorter, need not be known apart: noise, costs that are
    learned wrong, chunks of whole tokens.
    """

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self.value = tail.start

    def observe(self, times: float) -> None:
        """A step took so many times what its decodes would have, undisturbed."""
        tail = self._tail
        move = -GAIN * (1.0 - EXCEEDING_SHARE) if times > tail.limit else GAIN * EXCEEDING_SHARE
        self.value = min(max(self.value + move, tail.least), tail.most)
