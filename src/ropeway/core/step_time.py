"""How long a step takes: a linear model with six costs, fitted to steps as they are computed. Knows no queues.

    step_s = fixed_s + token_s x tokens up to KNEE_TOKENS + later_token_s x tokens beyond
           + pair_s x query-key pairs + row_s x rows of logits + read_s x positions whose keys and values are read

Decodes far into their answers wait for memory, chunks compute: so a position read costs apart from the pairs of the
tokens that share it, and how much depends on what else uses the memory. Up to the knee, reading the weights may hide
arithmetic, as on an accelerator, or tokens may gain from company, as on a processor. Plain floats and no clock: the
same observations in the same order give the same predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple, cast


class StepWork(NamedTuple):
    """What a step computes.

    num_pairs: the positions that its tokens attend to, summed over tokens. num_rows: of logits. num_reads: the
    positions whose keys and values are read, summed over chunks: the tokens of one share them.
    A slice of the layers computes its share of a chunk's.
    A tuple, because several are made for each step and each chunk: a frozen dataclass takes three times as long.
    """

    num_tokens: float
    num_pairs: float
    num_rows: int
    num_reads: float = 0


def num_pairs(start: int, num_tokens: int) -> int:
    """Query-key pairs of a chunk at positions start .. start + num_tokens - 1: each token attends to itself too."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step whatever is in it, per token below and beyond the knee, per query-key pair, per row of logits,
    per position read. None is negative.
    """

    fixed_s: float
    token_s: float
    later_token_s: float
    pair_s: float
    row_s: float
    read_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        num_tokens = work.num_tokens
        seconds = self.fixed_s + self.pair_s * work.num_pairs + self.row_s * work.num_rows
        seconds += self.read_s * work.num_reads
        if num_tokens <= KNEE_TOKENS:
            return seconds + self.token_s * num_tokens
        return seconds + self.token_s * KNEE_TOKENS + self.later_token_s * (num_tokens - KNEE_TOKENS)

    def decode_s(self, num_positions: float) -> float:
        """What one decode that attends to so many positions adds to a step, below the knee."""
        return self.token_s + self.row_s + (self.pair_s + self.read_s) * num_positions

    def num_chunk_tokens(self, work: StepWork, start: int, left_s: float, *, is_more: bool = False) -> int:
        """The longest chunk behind `start` computed positions that adds at most left_s to a step of `work`.

        is_more: the tokens before `start` are in the step too, and share what they read.
        """
        read_s = self.read_s
        token_s, later_token_s = self.token_s + read_s, self.later_token_s + read_s  # each reads itself
        if not is_more:
            left_s -= read_s * start
        num_early = max(0, KNEE_TOKENS - math.ceil(work.num_tokens))
        num_tokens = min(num_early, _longest(token_s, self.pair_s, start, left_s))
        if num_tokens < num_early:
            return num_tokens
        left_s -= token_s * num_tokens + self.pair_s * num_pairs(start, num_tokens)
        return min(num_tokens + _longest(later_token_s, self.pair_s, start + num_tokens, left_s), MAX_CHUNK_TOKENS)


NO_COSTS = StepCosts(0.0, 0.0, 0.0, 0.0, 0.0)


def _longest(token_s: float, pair_s: float, start: int, seconds: float) -> int:
    """The most tokens behind `start` with token_s for each and pair_s for each of their pairs within `seconds`."""
    # n (token_s + pair_s (start + 1/2)) + n^2 pair_s / 2 <= seconds
    linear = token_s + pair_s * (start + 0.5)
    if seconds <= 0.0:
        return 0
    if linear * MAX_CHUNK_TOKENS <= seconds and pair_s * MAX_CHUNK_TOKENS**2 <= seconds:
        return MAX_CHUNK_TOKENS
    # The root in the form that stays exact where pair_s is next to nothing.
    root = 2 * seconds / (linear + math.sqrt(linear * linear + 2 * pair_s * seconds))
    return min(MAX_CHUNK_TOKENS, int(root * (1 + 1e-12)))


KNEE_TOKENS = 256
MAX_CHUNK_TOKENS = 1 << 24
NUM_COSTS = 6  # that are learned
# What would be plausible for a cost of which the prior holds less, in units of the cost of a token. A pair: heads and
# layers do on it what thousands of weights do on a token. A read: less; decodes alone, which cannot tell the two apart,
# are then put down to pairs, so that a first chunk is not taken for cheap.
PLAUSIBLE = (1.0, 1.0, 1.0, 1 / 4096, 0.25, 1 / 16384)
PRIOR_DEVIATION = 0.5  # of each cost, relative to the prior
COMMON_DRIFT = 0.003  # of all costs together, per step: the machine's speed changes
OWN_DRIFT = 0.002  # of each cost by itself, per step
MAX_DEVIATION = 1.0
CLIP_DEVIATIONS = 3.0  # an observation moves the model by no more than one this far off would
NUM_BELIEVED = 4  # this many outliers in a row, to one side, are a change of speed
CHANGE_OF_SPEED = 0.3  # drift allowed for then
NOISE_WINDOW = 64  # steps over which the noise is estimated
FIRST_NOISE, MIN_NOISE, MAX_NOISE = 0.06, 0.02, 0.3  # relative deviation of a step's time


Six = tuple[float, float, float, float, float, float]
Triangle = tuple[
    float, float, float, float, float, float, float, float, float, float, float,
    float, float, float, float, float, float, float, float, float, float,
]  # fmt: skip


class StepTimeModel:
    """A Kalman filter over the six costs, each as a multiple of its prior, from relative errors.

    The costs drift: mostly together, as when a core is lost, and a little each by itself. So a long run of steps of one
    kind, which cannot tell the costs apart, scales the others along instead of returning them to the prior. Errors
    beyond CLIP_DEVIATIONS count as that far off; NUM_BELIEVED of them in a row, to one side, are taken for a change of
    speed. A cost that would turn negative is conditioned on being 0.
    """

    def __init__(self, prior: StepCosts) -> None:
        given = (prior.fixed_s, prior.token_s, prior.later_token_s, prior.pair_s, prior.row_s, prior.read_s)
        assert min(given) >= 0.0 and max(given) > 0.0, f"not the costs of a step: {prior}"
        # On a very busy machine what is timed may all be put down to one of them, be it the pairs.
        token_s = max(prior.token_s, prior.later_token_s, prior.row_s, prior.fixed_s / 1024, prior.pair_s)
        scales = [max(cost, plausible * token_s) for cost, plausible in zip(given, PLAUSIBLE, strict=True)]
        self._scales = cast(Six, tuple(scales))
        self._multiples = cast(Six, tuple([cost / scale for cost, scale in zip(given, scales, strict=True)]))
        # Of the symmetric matrix, the rows from their diagonals on. Compiled, tuples of a fixed length hold their
        # numbers in place: floats on the heap are fetched anew after each forward pass.
        self._covariance = _triangle(
            [[PRIOR_DEVIATION**2 * (i == j) for j in range(NUM_COSTS)] for i in range(NUM_COSTS)]
        )
        self._noise = FIRST_NOISE**2
        self._num_outliers = 0  # in a row; negative where steps were faster
        self.costs = prior

    def observe(self, work: StepWork, step_s: float) -> float:
        """Learn from a step of `work` that took step_s seconds; what was predicted for it."""
        predicted_s = self.costs.seconds(work)
        if predicted_s <= 0.0 or not 0.0 < step_s < math.inf:
            return predicted_s
        m0, m1, m2, m3, m4, m5 = self._multiples
        s0, s1, s2, s3, s4, s5 = self._scales
        a0, a1, a2, a3, a4, a5 = _amounts(work)
        # All drifting together adds COMMON_DRIFT^2 m m' to the covariance; the features are scaled so that f m = 1.
        # Written out, because it is done once a step: loops over both indices took two thirds of the time.
        f0, f1, f2 = s0 * a0 / predicted_s, s1 * a1 / predicted_s, s2 * a2 / predicted_s
        f3, f4, f5 = s3 * a3 / predicted_s, s4 * a4 / predicted_s, s5 * a5 / predicted_s
        (
            c00, c01, c02, c03, c04, c05, c11, c12, c13, c14, c15, c22, c23, c24, c25, c33, c34, c35, c44, c45, c55
        ) = self._covariance  # fmt: skip
        g0 = c00 * f0 + c01 * f1 + c02 * f2 + c03 * f3 + c04 * f4 + c05 * f5
        g1 = c01 * f0 + c11 * f1 + c12 * f2 + c13 * f3 + c14 * f4 + c15 * f5
        g2 = c02 * f0 + c12 * f1 + c22 * f2 + c23 * f3 + c24 * f4 + c25 * f5
        g3 = c03 * f0 + c13 * f1 + c23 * f2 + c33 * f3 + c34 * f4 + c35 * f5
        g4 = c04 * f0 + c14 * f1 + c24 * f2 + c34 * f3 + c44 * f4 + c45 * f5
        g5 = c05 * f0 + c15 * f1 + c25 * f2 + c35 * f3 + c45 * f4 + c55 * f5
        spread = f0 * g0 + f1 * g1 + f2 * g2 + f3 * g3 + f4 * g4 + f5 * g5
        error = step_s / predicted_s - 1.0
        limit = CLIP_DEVIATIONS * math.sqrt(spread + COMMON_DRIFT**2 + self._noise)
        drift = self._common_drift(error, limit) ** 2
        error = max(-limit, min(limit, error))
        unexplained = min(max(error * error - spread, MIN_NOISE**2), MAX_NOISE**2)
        self._noise += (unexplained - self._noise) / NOISE_WINDOW
        d0, d1, d2, d3, d4, d5 = drift * m0, drift * m1, drift * m2, drift * m3, drift * m4, drift * m5
        g0, g1, g2, g3, g4, g5 = g0 + d0, g1 + d1, g2 + d2, g3 + d3, g4 + d4, g5 + d5
        total = spread + drift + self._noise
        h0, h1, h2, h3, h4, h5 = g0 / total, g1 / total, g2 / total, g3 / total, g4 / total, g5 / total
        own = OWN_DRIFT**2
        v0, v1, v2 = c00 + d0 * m0 - g0 * h0 + own, c11 + d1 * m1 - g1 * h1 + own, c22 + d2 * m2 - g2 * h2 + own
        v3, v4, v5 = c33 + d3 * m3 - g3 * h3 + own, c44 + d4 * m4 - g4 * h4 + own, c55 + d5 * m5 - g5 * h5 + own
        self._covariance = (
            v0, c01 + d0 * m1 - g0 * h1, c02 + d0 * m2 - g0 * h2, c03 + d0 * m3 - g0 * h3,
            c04 + d0 * m4 - g0 * h4, c05 + d0 * m5 - g0 * h5,
            v1, c12 + d1 * m2 - g1 * h2, c13 + d1 * m3 - g1 * h3, c14 + d1 * m4 - g1 * h4,
            c15 + d1 * m5 - g1 * h5,
            v2, c23 + d2 * m3 - g2 * h3, c24 + d2 * m4 - g2 * h4, c25 + d2 * m5 - g2 * h5,
            v3, c34 + d3 * m4 - g3 * h4, c35 + d3 * m5 - g3 * h5,
            v4, c45 + d4 * m5 - g4 * h5,
            v5,
        )  # fmt: skip
        m0, m1, m2 = m0 + h0 * error, m1 + h1 * error, m2 + h2 * error
        m3, m4, m5 = m3 + h3 * error, m4 + h4 * error, m5 + h5 * error
        self._multiples = (m0, m1, m2, m3, m4, m5)
        if min(m0, m1, m2, m3, m4, m5) < 0.0 or max(v0, v1, v2, v3, v4, v5) > MAX_DEVIATION**2:
            self._bound()
            m0, m1, m2, m3, m4, m5 = self._multiples
        self.costs = StepCosts(m0 * s0, m1 * s1, m2 * s2, m3 * s3, m4 * s4, m5 * s5)
        return predicted_s

    def _common_drift(self, error: float, limit: float) -> float:
        """The drift to allow for: far more than usual where outliers keep coming from one side: the speed changed."""
        if abs(error) <= limit:
            self._num_outliers = 0
            return COMMON_DRIFT
        side = 1 if error > 0 else -1
        self._num_outliers = self._num_outliers + side if self._num_outliers * side > 0 else side
        return CHANGE_OF_SPEED if abs(self._num_outliers) >= NUM_BELIEVED else COMMON_DRIFT

    def _bound(self) -> None:
        """Keep costs from turning negative, and what is not known of them within bounds."""
        multiples, entries = list(self._multiples), iter(self._covariance)
        covariance = [[0.0] * NUM_COSTS for _ in range(NUM_COSTS)]
        for i, j in combinations_with_replacement(range(NUM_COSTS), 2):
            covariance[i][j] = covariance[j][i] = next(entries)
        for i, row in enumerate(covariance):
            most = (MAX_DEVIATION * max(1.0, multiples[i])) ** 2
            if row[i] > most:
                factor = math.sqrt(most / row[i])
                for j in range(NUM_COSTS):
                    covariance[i][j] *= factor
                    covariance[j][i] *= factor
        while (least := min(multiples)) < 0.0:
            i = multiples.index(least)
            shift = least / covariance[i][i]
            multiples = [m - row[i] * shift for m, row in zip(multiples, covariance, strict=True)]
            multiples[i] = 0.0
            for j in range(NUM_COSTS):  # it is 0 for now, so the others owe it nothing
                if j != i:
                    covariance[i][j] = covariance[j][i] = 0.0
        self._multiples = cast(Six, tuple(multiples))
        self._covariance = _triangle(covariance)


def _triangle(matrix: list[list[float]]) -> Triangle:
    return cast(Triangle, tuple([matrix[i][j] for i, j in combinations_with_replacement(range(NUM_COSTS), 2)]))


def _amounts(work: StepWork) -> Six:
    """How much of each cost a step has."""
    num_early = min(work.num_tokens, KNEE_TOKENS)
    return 1, num_early, work.num_tokens - num_early, work.num_pairs, work.num_rows, work.num_reads


def fit_step_costs(observations: Iterable[tuple[StepWork, float]], read_pairs: float = 0.0) -> StepCosts:
    """The costs with the least sum of squared relative errors over steps and their seconds; none negative.

    Coordinate descent, of which each move is exact. Where no step went beyond the knee, tokens there cost as below it.
    read_pairs: pairs that cost as much as a read; given, not fitted.
    """
    rows: list[list[float]] = []
    for work, step_s in observations:
        assert step_s > 0.0, "a step takes time"
        *amounts, num_rows, num_reads = _amounts(work)
        amounts[-1] += read_pairs * num_reads
        rows.append([amount / step_s for amount in (*amounts, num_rows)])
    norms = [sum(row[i] ** 2 for row in rows) for i in range(NUM_COSTS - 1)]
    costs = [0.0] * (NUM_COSTS - 1)
    residuals = [1.0] * len(rows)
    for _ in range(4000):
        for i in range(NUM_COSTS - 1):
            if norms[i] == 0.0:
                continue
            move = sum(row[i] * residual for row, residual in zip(rows, residuals, strict=True)) / norms[i]
            cost = max(0.0, costs[i] + move)
            move, costs[i] = cost - costs[i], cost
            residuals = [residual - move * row[i] for row, residual in zip(rows, residuals, strict=True)]
    fixed_s, token_s, later_token_s, pair_s, row_s = costs
    return StepCosts(fixed_s, token_s, later_token_s if norms[2] else token_s, pair_s, row_s, read_pairs * pair_s)
