"""What the engine counts, as one frozen message. Knows nothing of where it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ropeway.core.params import FinishReason
from ropeway.core.step_time import StepCosts


class PacingStats(NamedTuple):
    """What the pacing expects and sees. Sums since the start, over steps and over sequences. Given by name.

    costs: of a step, as believed now. ttft_s, tpot_s: the targets. predicted_s, achieved_s: of the steps computed, in
    all. num_first_tokens, num_in_ttft: sequences that got their first token, those of them within the target;
    num_answers, num_in_tpot: those that ended with at least 2 tokens. Background ones are in none of these. Without a
    target all count as within it.
    num_refused: requests at the door. is_overloaded: the last one was. is_tpot_out_of_reach: a step of what decodes,
    alone, takes longer than the target.
    """

    costs: StepCosts
    ttft_s: float | None
    tpot_s: float | None
    predicted_s: float
    achieved_s: float
    num_first_tokens: int
    num_in_ttft: int
    num_answers: int
    num_in_tpot: int
    num_refused: int
    is_overloaded: bool
    is_tpot_out_of_reach: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceProgress:
    """Where one sequence of an unfinished request is: waiting, running, preempted or finished; and why it waits."""

    index: int
    state: str
    waiting_reason: str | None


class EngineStats(NamedTuple):
    """Gauges of now, and counters since the start. Given by name.

    A tuple, as what a plan and a result are: one is made every step, and a frozen dataclass sets its fields one by one.

    Gauges: num_running, num_waiting (never ran), num_preempted (wait to be recomputed): sequences.
    num_blocks = num_free_blocks + num_used_blocks; used are those that sequences hold. num_cached_blocks: of the free
    ones, those whose tokens can still be shared.
    Counters: num_prompt_tokens counts each prompt token once, when it is first computed; tokens computed again after a
    preemption are in num_recomputed_tokens only. num_generation_tokens: sampled tokens. num_padding_tokens: computed
    for finished members of a padded static batch. num_finished: sequences by finish reason. num_steps: of which
    num_failed_steps could not be computed. num_prefix_queries: prompt tokens of sequences that boarded, while the
    prefix cache is on; num_prefix_hits: of them, those it held, which are in no other count of tokens.
    num_evicted_blocks: blocks it gave up for other tokens.
    """

    num_running: int
    num_waiting: int
    num_preempted: int
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_padding_tokens: int
    num_steps: int
    num_failed_steps: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_cached_blocks: int
    num_evicted_blocks: int
    num_finished: Mapping[FinishReason, int]
    num_timeouts: int = 0
    num_places: int = 0
    waiting_reason: str | None = None
    pacing: PacingStats | None = None
