"""How much one step may hold. Knows no queues, memory or policies.

The scheduler asks once per step, when the decodes are known, and then as each prefill chunk is added.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ropeway.core.params import MAX_COUNT
from ropeway.core.plan import LayerSlice, StepPlan
from ropeway.core.sequence import Sequence
from ropeway.core.stats import PacingStats


class StepLoad(NamedTuple):
    """What asks for a place in a step.

    num_rows, of one token each, which attend to num_context_tokens positions in all, are in it whatever else is.
    num_prefilling_tokens: yet to be computed for sequences that prefill; num_prefilled_tokens: computed for them.
    num_queued_tokens: yet to be computed for those in line. num_background_tokens: of both, those of background work.
    longest_wait_s: since the first of the others in line joined it, in policy order, where it waits for a first token.
    num_prompts: sequences that prefill or wait, as far as there are places for them.
    """

    num_rows: int
    num_context_tokens: int
    num_prefilling_tokens: int = 0
    num_queued_tokens: int = 0
    longest_wait_s: float = 0.0
    num_prompts: int = 0
    num_prefilled_tokens: int = 0
    num_background_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Yet to be computed before everybody has a first token."""
        return self.num_prefilling_tokens + self.num_queued_tokens

    @property
    def num_interactive_tokens(self) -> int:
        """Of these, those that latency targets are for."""
        return self.num_prompt_tokens - self.num_background_tokens


class Ahead(NamedTuple):
    """What an arrival finds, at that moment, but for background work: that makes way.

    num_queued_tokens: yet to be computed for those in line; num_prefilling_tokens: for sequences that prefill.
    num_decoding: sequences that decode.
    """

    num_queued_tokens: int = 0
    num_prefilling_tokens: int = 0
    num_decoding: int = 0


class StepBudget(Protocol):
    """What is left of one step. max_num_running: who may run after it, for the targets' sake."""

    @property
    def max_num_running(self) -> int: ...

    def num_prefill_tokens(self, start: int, *, is_more: bool = False) -> int:
        """How many more tokens fit, for a sequence whose first `start` tokens are computed.

        is_more: some of those are a chunk of this step, which would grow.
        """

    def wave(self, start: int, num_tokens: int) -> tuple[int, int] | None:
        """(tokens, slices): of a prompt whose first `start` tokens are computed and whose next num_tokens are not, what
        gets further over so many steps than chunks of one step each. None where nothing does.
        """

    def take_slice(self, start: int, num_tokens: int, layer_slice: LayerSlice, is_sampled: bool) -> bool:
        """A slice of such a chunk is in the step, with a row of logits where is_sampled.

        False, and it is not, where the step must not hold so many tokens.
        """

    def is_worth_sharing(self, start: int) -> bool:
        """Whether several prompts should share what is left, though each reads its keys, one of them `start` of them.

        Otherwise they take turns, a step each.
        """

    def add_prefill(self, start: int, num_tokens: int, is_sampled: bool, *, is_more: bool = False) -> None:
        """A chunk is in the step: tokens at start .. start + num_tokens - 1, and a row of logits where is_sampled.

        is_more: the chunk that ends at `start` grew by these.
        """


class Pacing(Protocol):
    """What a scheduler asks of a pacing.

    A step without decodes must hold at least one prefill token.
    """

    @property
    def max_num_running(self) -> int:
        """Most sequences that may run: no more than a step has room to decode."""

    @property
    def num_places(self) -> int:
        """How many may run for the targets' sake, as of the step begun last; more may, who boarded before."""

    def num_extra_samples(self, num_single: int, num_multiple: int) -> int:
        """How many samples, beyond the first of each request, may be under way.

        num_single: requests of one sample that run or would; num_multiple: of more. The promise is made to the former.
        """

    def begin_step(self, load: StepLoad, now_s: float) -> StepBudget:
        """The budget of the step being planned."""

    def check_arrival(self, num_tokens: int, ahead: Ahead) -> None:
        """A prompt of num_tokens arrives behind others. Raises OverloadedError to refuse it."""

    def on_computed(self, plan: StepPlan, step_s: float) -> None:
        """A step was computed, in step_s seconds from plan to commit."""

    def on_first_token(self, sequence: Sequence, now_s: float) -> None:
        """A sequence got its first token. No target is for background ones."""

    def on_finished(self, sequence: Sequence, now_s: float) -> None:
        """A sequence ended with the last token it got, at now_s."""

    def stats(self) -> PacingStats | None:
        """What it expects and sees; None where it looks at nothing."""


class FixedTokenBudget:
    """Every step holds at most so many tokens, whatever they cost."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    @property
    def max_num_running(self) -> int:
        return self._num_tokens  # so decodes never use up the budget that a prefill waits for

    @property
    def num_places(self) -> int:
        return MAX_COUNT

    def num_extra_samples(self, num_single: int, num_multiple: int) -> int:
        return MAX_COUNT

    def begin_step(self, load: StepLoad, now_s: float) -> StepBudget:
        return TokensLeft(self._num_tokens - load.num_rows)

    def check_arrival(self, num_tokens: int, ahead: Ahead) -> None:
        pass

    def on_computed(self, plan: StepPlan, step_s: float) -> None:
        pass

    def on_first_token(self, sequence: Sequence, now_s: float) -> None:
        pass

    def on_finished(self, sequence: Sequence, now_s: float) -> None:
        pass

    def stats(self) -> None:
        return None


class TokensLeft:
    """A number of tokens that chunks take from."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    @property
    def max_num_running(self) -> int:
        return MAX_COUNT

    def num_prefill_tokens(self, start: int, *, is_more: bool = False) -> int:
        return self._num_tokens

    def wave(self, start: int, num_tokens: int) -> tuple[int, int] | None:
        return None

    def take_slice(self, start: int, num_tokens: int, layer_slice: LayerSlice, is_sampled: bool) -> bool:
        if num_tokens > self._num_tokens:
            return False
        self._num_tokens -= num_tokens
        return True

    def is_worth_sharing(self, start: int) -> bool:
        return True

    def add_prefill(self, start: int, num_tokens: int, is_sampled: bool, *, is_more: bool = False) -> None:
        self._num_tokens -= num_tokens
