"""How many tokens a step may have: timed forward passes at load. Reads the clock; knows nothing of scheduling."""

from __future__ import annotations

import logging
import time

import numpy as np

from ropeway.backends.batch import Backend, BlockTables, ForwardBatch
from ropeway.config import MAX_DEFAULT_NUM_SEQS, EngineFacts
from ropeway.model.program import Program

logger = logging.getLogger(__name__)

FULL_STEP_S = 0.1
FIRST_SIZE_TOKENS = 16
MIN_TOKEN_BUDGET = 32  # fewer would starve sequences on a machine that is busy only while it starts
MAX_TOKEN_BUDGET = 8192
NUM_TRIES = 5  # the least counts: anything slower was disturbed


def calibrate_token_budget(backend: Backend, program: Program, facts: EngineFacts) -> int:
    """The most tokens a step may have to take at most FULL_STEP_S, from timed forward passes on the empty KV pool.

    Each pass is one prompt of T tokens with logits for as many rows as could decode in such a step; T doubles until
    half of the limit is reached, and the rest is extrapolated on the line through the last two. Attention over a long
    context is not in it: that costs a step more. At least MIN_TOKEN_BUDGET, with a warning where that is too much.
    """
    ceiling = min(MAX_TOKEN_BUDGET, facts.num_kv_blocks * facts.block_size, program.context_length)
    max_rows = facts.max_num_seqs or MAX_DEFAULT_NUM_SEQS

    def seconds(num_tokens: int) -> float:
        batch = _calibration_batch(program, num_tokens, min(num_tokens, max_rows), facts)
        start_s = time.perf_counter()
        backend.forward(batch)
        return time.perf_counter() - start_s

    size = min(FIRST_SIZE_TOKENS, ceiling)
    seconds(size)  # the first pass also pays for touching memory
    before, taken_s = (0, 0.0), min(seconds(size) for _ in range(NUM_TRIES))
    while taken_s < FULL_STEP_S / 2 and size * 2 <= ceiling:
        before, size = (size, taken_s), size * 2
        taken_s = min(seconds(size) for _ in range(NUM_TRIES))
    token_s = max((taken_s - before[1]) / (size - before[0]), 1e-9)
    budget = size + int((FULL_STEP_S - taken_s) / token_s)
    if budget < MIN_TOKEN_BUDGET:
        logger.warning(
            "%d tokens take %.0f ms: the machine is busy or slow, and full steps will take more than %.0f ms; "
            "set max_num_batched_tokens to choose the token budget yourself",
            size,
            taken_s * 1000,
            FULL_STEP_S * 1000,
        )
    rounded = min(budget, 2 * size, ceiling) // FIRST_SIZE_TOKENS * FIRST_SIZE_TOKENS
    return max(rounded, MIN_TOKEN_BUDGET)


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
