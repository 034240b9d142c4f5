"""The sampler written plainly in numpy: what the native one must equal, token for token. Knows no model.

After the temperature, likelihoods are integers. The weight of a token is its probability relative to the likeliest one,
in units of 2^-30, and sums of integers are exact: no filter and no draw depends on an order of summation, so the answer
is the same for every batch, thread count and instruction set. `token_weights` states the few float32 operations that
lead there. A token whose weight is 0 (under 2^-31 of the likeliest) is never drawn.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ropeway.backends.batch import Float32Array, Int32Array, Logprobs, SampleRows, Samples, ScoreBatch

Int64Array = npt.NDArray[np.int64]

WEIGHT_ONE = 2**30  # weight of the likeliest token
_STEPS_PER_OCTAVE = 2**21  # resolution of the exponent: weights are monotone in the logit (asserted over all steps)
_STEPS_PER_NAT = np.float32(_STEPS_PER_OCTAVE / math.log(2))
_MAX_STEPS = np.float32(33 * _STEPS_PER_OCTAVE)
_FLOAT32_MAX = np.finfo(np.float32).max

# 2^(23 + z) for z in [0, 1): minimax of the relative error, 2e-9 before rounding to float32; 9e-8 when evaluated.
_EXP2_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (1813.0230712890625, 10458.7861328125, 81163.5703125, 465444.28125, 2015189.5, 5814539.0, 2.0**23)
)


def sample_reference(logits: Float32Array, batch: SampleRows) -> Samples:
    """Draws one token for each row of the batch, applying biases, masks and penalties to its logits[R, V] in place."""
    num_rows = len(batch.temperature)
    logits_rows = np.arange(num_rows) if batch.logits_rows is None else batch.logits_rows
    wanted = batch.logprobs
    raw = None if wanted is None else logits[logits_rows[wanted.rows]]
    draws = [sample_row(logits[logits_rows[row]], batch, row) for row in range(num_rows)]
    token_ids = np.array([draw or 0 for draw in draws], dtype=np.int32)
    logprobs = None
    if wanted is not None and raw is not None:
        every = np.arange(len(raw), dtype=np.int32)
        logprobs = score_reference(raw, ScoreBatch(every, token_ids[wanted.rows], wanted.num_top))
    return Samples(token_ids, np.array([draw is None for draw in draws], dtype=np.bool_), logprobs)


def score_reference(logits: Float32Array, batch: ScoreBatch) -> Logprobs:
    """Log-softmax in double precision; the likeliest tokens come first, of equals the lowest id."""
    num_top = min(batch.num_top, logits.shape[1])
    logprobs, ranks = [], []
    top_ids = np.zeros((len(batch.rows), num_top), dtype=np.int32)
    top_logprobs = np.zeros((len(batch.rows), num_top), dtype=np.float32)
    for i, (row, token_id) in enumerate(zip(batch.rows.tolist(), batch.token_ids.tolist(), strict=True)):
        values = logits[row].astype(np.float64)
        scores = values - values.max()
        scores -= np.log(np.exp(scores).sum())
        logprobs.append(scores[token_id])
        ranks.append(1 + np.count_nonzero(values > values[token_id]))
        top_ids[i] = np.argsort(-values, kind="stable")[:num_top]
        top_logprobs[i] = scores[top_ids[i]]
    return Logprobs(np.array(logprobs, dtype=np.float32), np.array(ranks, dtype=np.int32), top_ids, top_logprobs)


def sample_row(logits: Float32Array, batch: SampleRows, row: int) -> int | None:
    """The token of one row of logits[V]; None if they hold a NaN or every one of them is -inf."""
    adjust_logits(logits, batch, row)
    if np.isnan(logits).any() or logits.max() == -np.inf:
        return None
    logits = np.minimum(logits, _FLOAT32_MAX)
    if batch.temperature[row] == 0.0:
        return int(np.argmax(logits))  # the first of equals
    survivors, weights = surviving_tokens(
        logits, batch.temperature[row], int(batch.top_k[row]), float(batch.top_p[row]), float(batch.min_p[row])
    )
    uniform = uniform_bits(int(batch.seed[row]), int(batch.index[row]), int(batch.position[row]))
    target = uniform * int(weights.sum()) >> 64
    return int(survivors[np.searchsorted(np.cumsum(weights), target, side="right")])


def adjust_logits(logits: Float32Array, batch: SampleRows, row: int) -> None:
    """Adds the biases, masks the banned ids and what a grammar forbids, and applies the penalties, in place.

    Repetition (CTRL, Keskar et al. 2019): the logit of a token of prompt or output is divided by the penalty where
    positive, else multiplied. Frequency and presence are subtracted, per occurrence and once, for tokens of the output.
    """
    biased = slice(batch.bias_indptr[row], batch.bias_indptr[row + 1])
    np.add.at(logits, batch.bias_ids[biased], batch.bias_values[biased])
    logits[batch.banned_ids[batch.banned_indptr[row] : batch.banned_indptr[row + 1]]] = -np.inf
    if batch.masks is not None and row in batch.masks.rows:
        words = batch.masks.words[np.searchsorted(batch.masks.rows, row)]
        is_allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits)]
        logits[is_allowed == 0] = -np.inf

    history = batch.history[batch.history_offsets[row] :][: batch.num_tokens[row]]
    seen = np.unique(history)
    penalty = batch.repetition_penalty[row]
    generated, counts = np.unique(history[batch.num_prompt_tokens[row] :], return_counts=True)
    with np.errstate(over="ignore", invalid="ignore"):  # a logit may be anything; a NaN is found afterwards
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        logits[generated] -= batch.frequency_penalty[row] * counts.astype(np.float32)
        logits[generated] -= batch.presence_penalty[row]


def token_weights(logits: Float32Array, temperature: np.float32) -> Int64Array:
    """round(2^30 * exp((logit - max) / temperature)) for each of logits[V]: relative error 2e-6, plus 0.5.

    The distance to the likeliest is an integer, in steps of 2^-21 octaves; 2^-distance is a float32 polynomial of the
    fraction, scaled down by the octaves. Every float32 operation below rounds once, as IEEE 754 has it.
    """
    with np.errstate(over="ignore"):
        steps = (logits.max() - logits) / temperature * _STEPS_PER_NAT
    distance = (np.minimum(steps, _MAX_STEPS) + np.float32(0.5)).astype(np.int64)
    octaves = -(-distance // _STEPS_PER_OCTAVE)
    fraction = (octaves * _STEPS_PER_OCTAVE - distance).astype(np.float32) / np.float32(_STEPS_PER_OCTAVE)
    mantissa = np.zeros_like(fraction)
    for coefficient in _EXP2_COEFFICIENTS:
        mantissa = mantissa * fraction + coefficient
    unit = np.ldexp(np.float32(1), (7 - octaves).astype(np.int32))
    weights: Int64Array = (mantissa * unit + np.float32(0.5)).astype(np.int64)
    return weights


def surviving_tokens(
    logits: Float32Array, temperature: np.float32, top_k: int, top_p: float, min_p: float
) -> tuple[Int32Array, Int64Array]:
    """The ids that min_p, top_k and top_p leave, ascending, and weights. Of equals, the lowest id is the likelier."""
    weights = token_weights(logits, temperature)
    ranked = np.argsort(-logits.astype(np.float64), kind="stable")
    ranked = ranked[weights[ranked] >= max(1, math.ceil(min_p * WEIGHT_ONE))]
    if top_k:
        ranked = ranked[:top_k]
    if top_p < 1.0:
        cumulative = np.cumsum(weights[ranked])
        needed = max(1, math.ceil(top_p * float(cumulative[-1])))
        ranked = ranked[: np.searchsorted(cumulative, needed) + 1]
    survivors = np.sort(ranked)
    return survivors.astype(np.int32), weights[survivors]


def uniform_bits(seed: int, index: int, position: int) -> int:
    """64 uniform bits: two words of Philox4x32-10, the seed as key, (position, index, 0, 0) as counter."""
    words = philox4x32((position, index, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return words[0] | words[1] << 32


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011): four words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3
