"""A pacing that sends most prompts through the model in waves, whatever they cost."""

from __future__ import annotations

from ropeway.core.pacing import FixedTokenBudget, StepBudget, StepLoad, TokensLeft
from support.stand_in import StandIn


class WaveTokens(StandIn):
    """Begins a wave of some of the tokens left, wherever more than one is to be computed; else as TokensLeft."""

    def __init__(self, num_tokens: int, max_num_slices: int) -> None:
        super().__init__(TokensLeft(num_tokens))
        self._max_num_slices = max_num_slices

    def wave(self, start: int, num_tokens: int) -> tuple[int, int] | None:
        most = min(num_tokens, self._original._num_tokens)
        if most < 1 or start % 5 == 4:
            return None
        return max(1, most - start % 3), 2 + start % (self._max_num_slices - 1)


class WavePacing(StandIn):
    """max_num_slices: of the model, at least 2. Else as FixedTokenBudget."""

    def __init__(self, num_tokens: int, max_num_slices: int = 4) -> None:
        super().__init__(FixedTokenBudget(num_tokens))
        self._num_tokens, self._max_num_slices = num_tokens, max_num_slices

    def begin_step(self, load: StepLoad, now_s: float) -> StepBudget:
        return WaveTokens(self._num_tokens - load.num_rows, self._max_num_slices)
