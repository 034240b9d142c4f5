"""How much one step may hold. Knows no queues, memory or policies.

The scheduler asks once per step, when the decodes are known, and then as each prefill chunk is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ropeway.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The rows of a step that are in it whatever else is: num_rows of one token each, which attend to
    num_context_tokens positions in all. num_waiting: sequences that wait, or prefill.
    """

    num_rows: int
    num_context_tokens: int
    num_waiting: int


class StepBudget(Protocol):
    """What is left of one step."""

    def num_prefill_tokens(self, start: int) -> int:
        """How many more tokens fit, for a sequence whose first `start` tokens are computed."""

    def add_prefill(self, start: int, num_tokens: int, is_sampled: bool) -> None:
        """A chunk is in the step: tokens at start .. start + num_tokens - 1, and a row of logits where is_sampled."""


class Pacing(Protocol):
    """What a scheduler asks of a pacing.

    A step without decodes must hold at least one prefill token.
    """

    @property
    def max_num_running(self) -> int:
        """Most sequences that may run: no more than a step has room to decode."""

    def begin_step(self, load: DecodeLoad, now_s: float) -> StepBudget:
        """The budget of the step being planned."""

    def on_computed(self, plan: StepPlan, step_s: float) -> None:
        """A step was computed, in step_s seconds from plan to commit."""


class FixedTokenBudget:
    """Every step holds at most so many tokens, whatever they cost."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    @property
    def max_num_running(self) -> int:
        return self._num_tokens  # so decodes never use up the budget that a prefill waits for

    def begin_step(self, load: DecodeLoad, now_s: float) -> StepBudget:
        return TokensLeft(self._num_tokens - load.num_rows)

    def on_computed(self, plan: StepPlan, step_s: float) -> None:
        pass


class TokensLeft:
    """A number of tokens that chunks take from."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def num_prefill_tokens(self, start: int) -> int:
        return self._num_tokens

    def add_prefill(self, start: int, num_tokens: int, is_sampled: bool) -> None:
        self._num_tokens -= num_tokens
