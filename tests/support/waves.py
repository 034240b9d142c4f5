"""A pacing that sends most prompts through the model in waves, whatever they cost."""

from __future__ import annotations

from ropeway.core.pacing import FixedTokenBudget, StepBudget, StepLoad, TokensLeft


class WaveTokens(TokensLeft):
    """Begins a wave of some of the tokens that are left wherever more than one is to be computed."""

    def __init__(self, num_tokens: int, max_num_slices: int) -> None:
        super().__init__(num_tokens)
        self._max_num_slices = max_num_slices

    def wave(self, start: int, num_tokens: int) -> tuple[int, int] | None:
        most = min(num_tokens, self._num_tokens)
        if most < 1 or start % 5 == 4:
            return None
        return max(1, most - start % 3), 2 + start % (self._max_num_slices - 1)


class WavePacing(FixedTokenBudget):
    """max_num_slices: of the model, at least 2."""

    def __init__(self, num_tokens: int, max_num_slices: int = 4) -> None:
        super().__init__(num_tokens)
        self._max_num_slices = max_num_slices

    def begin_step(self, load: StepLoad, now_s: float) -> StepBudget:
        return WaveTokens(self._num_tokens - load.num_rows, self._max_num_slices)
