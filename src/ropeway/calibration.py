"""How many tokens a step may have: timed forward passes at load. Reads the clock; knows nothing of scheduling."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from ropeway.backends.batch import Backend, BlockTables, ForwardBatch
from ropeway.config import MAX_DEFAULT_NUM_SEQS, EngineFacts
from ropeway.model.program import Program

logger = logging.getLogger(__name__)

FULL_STEP_S = 0.1
GRANULE_TOKENS = 16  # budgets are multiples of it
MIN_TOKEN_BUDGET = 64  # fewer would starve sequences on a machine that is busy only while it starts
MAX_TOKEN_BUDGET = 8192
CALIBRATION_S = 0.25  # no round begins later than this
MIN_NUM_ROUNDS, MAX_NUM_ROUNDS = 1, 6


def calibrate_token_budget(
    backend: Backend, program: Program, facts: EngineFacts, clock: Callable[[], float] = time.perf_counter
) -> int:
    """The most tokens a step may have to take at most FULL_STEP_S, from timed forward passes on the empty KV pool.

    Each pass is one prompt of T tokens with logits for as many rows as could decode in such a step. T doubles until
    it takes half of the limit; then that size and half of it are timed in turn, for CALIBRATION_S. The fastest pass
    of each size counts, since all that disturbs a pass makes it slower, and the limit is put on the line through the
    two, but at no more than twice the larger size. Attention over a long context is not in it: that costs a step
    more. At least MIN_TOKEN_BUDGET, with a warning where that takes longer than FULL_STEP_S.

    clock: seconds, monotonic.
    """
    ceiling = min(MAX_TOKEN_BUDGET, facts.num_kv_blocks * facts.block_size, program.context_length)
    max_rows = facts.max_num_seqs or MAX_DEFAULT_NUM_SEQS
    fastest: dict[int, float] = {}

    def time_pass(num_tokens: int) -> None:
        batch = _calibration_batch(program, num_tokens, min(num_tokens, max_rows), facts)
        start_s = clock()
        backend.forward(batch)
        fastest[num_tokens] = min(clock() - start_s, fastest.get(num_tokens, float("inf")))

    start_s = clock()
    large = min(2 * GRANULE_TOKENS, ceiling)
    time_pass(large)  # the first pass also pays for touching memory
    time_pass(large)
    while fastest[large] < FULL_STEP_S / 2 and large * 2 <= ceiling:
        large *= 2
        time_pass(large)
    small = max(1, large // 2)
    for num_rounds in range(MAX_NUM_ROUNDS):
        if num_rounds >= MIN_NUM_ROUNDS and clock() - start_s > CALIBRATION_S:
            break
        time_pass(small)
        time_pass(large)
    budget = min(_budget(small, fastest[small], large, fastest[large]), ceiling) // GRANULE_TOKENS * GRANULE_TOKENS
    if budget < min(MIN_TOKEN_BUDGET, ceiling):
        logger.warning(
            "%d tokens take %.0f ms: the machine is busy or slow, and full steps of %d tokens will take more than "
            "%.0f ms; set max_num_batched_tokens to choose the token budget yourself",
            large,
            fastest[large] * 1000,
            MIN_TOKEN_BUDGET,
            FULL_STEP_S * 1000,
        )
    return max(budget, MIN_TOKEN_BUDGET)


def _budget(small: int, small_s: float, large: int, large_s: float) -> int:
    """Where the line through two timings meets FULL_STEP_S, at most 2 x large: steps grow faster than a line."""
    # A disturbed `small` pass flattens the line; half of the mean cost per token is the least that is believed.
    token_s = max((large_s - small_s) / max(large - small, 1), large_s / large / 2, 1e-9)
    return min(large + int((FULL_STEP_S - large_s) / token_s), 2 * large)


def _calibration_batch(program: Program, num_tokens: int, num_rows: int, facts: EngineFacts) -> ForwardBatch:
    block_ids = np.arange(-(-num_tokens // facts.block_size), dtype=np.int32)
    table = BlockTables(block_ids, np.zeros(1, dtype=np.int64))
    return ForwardBatch(
        token_ids=np.arange(num_tokens, dtype=np.int32) % program.vocab_size,
        positions=np.arange(num_tokens, dtype=np.int32),
        query_indptr=np.array([0, num_tokens], dtype=np.int32),
        kv_lens=np.array([num_tokens], dtype=np.int32),
        tables=(table,) * len(program.cache_groups),
        out_rows=np.arange(num_tokens - num_rows, num_tokens, dtype=np.int32),
    )
