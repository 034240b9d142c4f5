"""What a step costs on this machine: timed forward passes at load. Reads the clock; knows nothing of scheduling."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ropeway.backends.batch import Backend, BlockTables, ForwardBatch
from ropeway.config import EngineFacts
from ropeway.core.step_time import StepCosts, StepWork, fit_step_costs, num_pairs
from ropeway.model.program import Program

logger = logging.getLogger(__name__)

FULL_PASS_S = 0.05  # a pass that takes this long tells enough of the cost of a token
SMALL_PASS_TOKENS, MAX_PASS_TOKENS = 32, 1024
DECODE_ROWS, DECODE_CONTEXT = 16, 16
CHUNK_TOKENS, CHUNK_CONTEXT = 16, 1024  # a chunk far into a prompt, for the cost of a query-key pair
# Pairs that cost as much as reading a position's keys and values. Default model on two cores: a position of a decode
# takes 1.4 to 1.8 us; behind 7,000 tokens a chunk's first token 1.1 for each, a pair of many 0.7 to 0.9. Passes beside
# other work do not tell the two apart; steps teach what both cost.
READ_PAIRS = 1.0
CALIBRATION_S = 0.3  # no round begins later than this
MIN_NUM_ROUNDS, MAX_NUM_ROUNDS = 1, 6
SLOW_TOKEN_S = 0.02


@dataclass(frozen=True, slots=True)
class _Pass:
    """num_sequences sequences of which each computes num_tokens behind num_context, and one row of logits."""

    num_sequences: int
    num_tokens: int
    num_context: int = 0

    @property
    def work(self) -> StepWork:
        pairs = self.num_sequences * num_pairs(self.num_context, self.num_tokens)
        reads = self.num_sequences * (self.num_context + self.num_tokens)
        return StepWork(self.num_sequences * self.num_tokens, pairs, self.num_sequences, reads)


def calibrate_step_costs(
    backend: Backend, program: Program, facts: EngineFacts, clock: Callable[[], float] = time.perf_counter
) -> StepCosts:
    """The costs of a step, from timed forward passes on the empty KV pool; a prior for what is learned online.

    Prompts of two sizes (the larger doubles until it takes FULL_PASS_S), one decode, several, and a chunk far into a
    prompt are timed in turn, for CALIBRATION_S. The fastest pass of each kind counts, since all that disturbs a pass
    makes it slower. What a machine or a pool is too small for is left out: `fit_step_costs` says what it costs then.
    Warns where a token takes longer than SLOW_TOKEN_S.

    clock: seconds, monotonic.
    """
    fastest: dict[_Pass, float] = {}
    most_tokens = min(facts.num_kv_blocks * facts.block_size, program.context_length)

    def time_pass(one: _Pass) -> None:
        batch = _batch_of(one, program, facts.block_size)
        start_s = clock()
        backend.forward(batch)
        fastest[one] = min(max(clock() - start_s, 1e-9), fastest.get(one, float("inf")))

    start_s = clock()
    small = _Pass(1, min(SMALL_PASS_TOKENS, most_tokens))
    time_pass(small)  # the first pass also pays for touching memory
    time_pass(small)
    large = small
    while fastest[large] < FULL_PASS_S and large.num_tokens * 2 <= min(MAX_PASS_TOKENS, most_tokens):
        large = _Pass(1, large.num_tokens * 2)
        time_pass(large)
    kinds = [_Pass(1, 1), small, large]
    blocks_each = -(-(DECODE_CONTEXT + 1) // facts.block_size)
    if DECODE_ROWS * blocks_each <= facts.num_kv_blocks and most_tokens > DECODE_CONTEXT:
        kinds.append(_Pass(DECODE_ROWS, 1, DECODE_CONTEXT))
    if (context := min(CHUNK_CONTEXT, most_tokens // 2)) >= CHUNK_TOKENS:
        kinds.append(_Pass(1, CHUNK_TOKENS, context))
    for num_rounds in range(MAX_NUM_ROUNDS):
        if num_rounds >= MIN_NUM_ROUNDS and clock() - start_s > CALIBRATION_S:
            break
        for kind in kinds:
            time_pass(kind)
    costs = fit_step_costs([(one.work, seconds) for one, seconds in fastest.items()], READ_PAIRS)
    if fastest[large] / large.num_tokens > SLOW_TOKEN_S:
        logger.warning(
            "%d tokens take %.0f ms: the machine is busy or slow, and prompts will be",
            large.num_tokens,
            fastest[large] * 1000,
        )
    return costs


def _batch_of(one: _Pass, program: Program, block_size: int) -> ForwardBatch:
    num_rows, num_tokens = one.num_sequences, one.num_tokens
    kv_len = one.num_context + num_tokens
    blocks_each = -(-kv_len // block_size)
    table = BlockTables(
        np.arange(num_rows * blocks_each, dtype=np.int32), np.arange(num_rows, dtype=np.int64) * blocks_each
    )
    ends = np.arange(1, num_rows + 1, dtype=np.int32) * num_tokens
    return ForwardBatch(
        token_ids=np.arange(num_rows * num_tokens, dtype=np.int32) % program.vocab_size,
        positions=np.tile(np.arange(one.num_context, kv_len, dtype=np.int32), num_rows),
        query_indptr=np.concatenate([np.zeros(1, dtype=np.int32), ends]),
        kv_lens=np.full(num_rows, kv_len, dtype=np.int32),
        tables=(table,) * len(program.cache_groups),
        out_rows=ends - 1,
    )
