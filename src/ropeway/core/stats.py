"""What the engine counts, as one frozen message. Knows nothing of where it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ropeway.core.params import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges of now, and counters since the start.

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
