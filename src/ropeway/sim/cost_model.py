"""How long a step takes, from the shape of its plan. Knows no model, machine or clock; fitted to measured steps.

The simulator's own truth about step times: the scheduler never sees it, and what it learns online is judged by it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ropeway.core.plan import StepPlan
from ropeway.errors import ConfigError

_MAX_ROUNDS = 300
_TOLERANCE = 1e-9
_NUM_REWEIGHTINGS = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on.

    num_tokens: computed. num_pairs: query-key pairs of attention. num_rows: of logits, one per sampled sequence.
    num_lone_pairs: of the pairs, those of sequences that compute a single token, as a decode does.
    """

    num_tokens: float
    num_pairs: float
    num_rows: int
    num_lone_pairs: float = 0

    @staticmethod
    def of(plan: StepPlan) -> StepShape:
        """The shape of a plan. A row of n tokens from position p has n·p + n(n+1)/2 pairs; a slice of it, its share."""
        starts, counts = plan.starts, plan.num_tokens
        num_tokens = sum(counts)
        if plan.layer_slice is not None:
            whole, share = StepShape.of(plan._replace(layer_slice=None)), 1.0 / plan.layer_slice.count
            start, n = starts[-1], counts[-1]
            num_pairs = n * start + n * (n + 1) // 2
            num_lone_pairs = num_pairs if n == 1 else 0
            return StepShape(
                whole.num_tokens - n + share * n,
                whole.num_pairs - num_pairs + share * num_pairs,
                whole.num_rows,
                whole.num_lone_pairs - num_lone_pairs + share * num_lone_pairs,
            )
        if num_tokens == len(counts):
            num_pairs = sum(starts) + num_tokens
            return StepShape(num_tokens, num_pairs, sum(plan.is_sampled), num_pairs)
        num_pairs = sum([n * start + n * (n + 1) // 2 for start, n in zip(starts, counts, strict=True)])
        num_lone_pairs = sum([start + 1 for start, n in zip(starts, counts, strict=True) if n == 1])
        return StepShape(num_tokens, num_pairs, sum(plan.is_sampled), num_lone_pairs)


# Where a processor's kernels change their pace: they compute rows in tiles, so the fifth and the ninth token of a step
# cost more than the fourth and the eighth (measured: 11.5, 16, 17, 26 ms), and then up to the 24th next to nothing.
PROCESSOR_KNOTS = (1, 2, 4, 5, 8, 9, 12, 16, 24, 25, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: fixed + tokens, priced in ranges + pairs + rows + lone pairs.

    Tokens cost token_s[0] each up to knots[0], token_s[1] up to knots[1], and so on; the last price holds beyond the
    last knot. On a processor the first few tokens pay for reading the weights, on an accelerator tokens are nearly free
    until its arithmetic is full. A lone pair costs lone_pair_s more than another: the keys and values that a decode
    reads serve one token, those that a chunk reads serve all of it.
    """

    fixed_s: float
    token_s: tuple[float, ...]
    pair_s: float
    row_s: float
    knots: tuple[int, ...] = (8, 128)
    lone_pair_s: float = 0.0
    _at_knots_s: tuple[float, ...] = field(init=False, repr=False, compare=False)  # tokens up to 0 and up to each knot

    def __post_init__(self) -> None:
        if min(self.fixed_s, *self.token_s, self.pair_s, self.row_s, self.lone_pair_s) < 0:
            raise ConfigError(f"a cost must be at least 0 seconds: {self}")
        if len(self.token_s) != len(self.knots) + 1:
            raise ConfigError(
                f"{len(self.knots)} knots part tokens into as many ranges and one, not {len(self.token_s)}"
            )
        if not all(low < high for low, high in pairwise((0, *self.knots))):
            raise ConfigError(f"the knots {self.knots} must be above 0 and ascend")
        prices = zip(self.token_s, pairwise((0, *self.knots)), strict=False)
        at_knots_s = tuple(accumulate((price * (high - low) for price, (low, high) in prices), initial=0.0))
        object.__setattr__(self, "_at_knots_s", at_knots_s)

    def step_s(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes."""
        num_tokens, knots = shape.num_tokens, self.knots
        index = bisect_left(knots, num_tokens)
        beyond = num_tokens - knots[index - 1] if index else num_tokens
        tokens_s = self._at_knots_s[index] + self.token_s[index] * beyond
        pairs_s = self.pair_s * shape.num_pairs + self.lone_pair_s * shape.num_lone_pairs
        return self.fixed_s + tokens_s + pairs_s + self.row_s * shape.num_rows

    def scaled(self, factor: float) -> CostModel:
        """The same machine, `factor` times as slow."""
        return replace(
            self,
            fixed_s=self.fixed_s * factor,
            token_s=tuple([price * factor for price in self.token_s]),
            pair_s=self.pair_s * factor,
            row_s=self.row_s * factor,
            lone_pair_s=self.lone_pair_s * factor,
        )

    @staticmethod
    def fit(
        shapes: Sequence[StepShape], times_s: Sequence[float], knots: tuple[int, ...] = PROCESSOR_KNOTS
    ) -> CostModel:
        """The non-negative costs with the least squared error, relative to what they predict, over measured steps.

        Relative to what was measured, one slow step in ten would count for nothing, and the sum of all come out short.

        Raises ConfigError for fewer than 6 steps, or a time that is not positive.
        """
        if len(shapes) < 6 or len(shapes) != len(times_s) or min(times_s) <= 0:
            raise ConfigError(f"{len(shapes)} shapes with {len(times_s)} times cannot be fitted: at least 6 steps")
        times = np.asarray(times_s, dtype=np.float64)
        features = _features(shapes, knots)
        scale = times
        for _ in range(_NUM_REWEIGHTINGS):
            costs = _nonnegative_least_squares(features / scale[:, None], times / scale)
            scale = np.maximum(features @ costs, times.min())
        fixed_s, *token_s, pair_s, row_s, lone_pair_s = costs.tolist()
        return CostModel(fixed_s, tuple(token_s), pair_s, row_s, knots, lone_pair_s)


def _features(shapes: Sequence[StepShape], knots: tuple[int, ...]) -> npt.NDArray[np.float64]:
    tokens = np.array([shape.num_tokens for shape in shapes], dtype=np.float64)
    ranges = [np.clip(tokens - low, 0, high - low) for low, high in pairwise((0, *knots, np.inf))]
    pairs = np.array([shape.num_pairs for shape in shapes], dtype=np.float64)
    rows = np.array([shape.num_rows for shape in shapes], dtype=np.float64)
    lone_pairs = np.array([shape.num_lone_pairs for shape in shapes], dtype=np.float64)
    return np.stack([np.ones(len(tokens)), *ranges, pairs, rows, lone_pairs], axis=1)


def _nonnegative_least_squares(
    features: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The active-set method (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23), columns of length 1.

    Raises ConfigError where it does not come to an end, which rounding alone could bring about.
    """
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    scaled = features / scale
    solution, is_free = np.zeros(features.shape[1]), np.zeros(features.shape[1], dtype=bool)
    for _ in range(_MAX_ROUNDS):
        gradient = np.where(is_free, -np.inf, scaled.T @ (targets - scaled @ solution))
        entering = int(np.argmax(gradient))
        if gradient[entering] <= _TOLERANCE * np.linalg.norm(targets):
            return np.asarray(solution / scale)
        is_free[entering] = True
        while True:
            candidate = np.zeros_like(solution)
            candidate[is_free] = np.linalg.lstsq(scaled[:, is_free], targets, rcond=None)[0]
            negative = is_free & (candidate <= 0)
            if not negative.any():
                break
            # As far towards it as all stay at 0 or above; whichever arrives at 0 is held there.
            steps = solution[negative] / (solution[negative] - candidate[negative])
            solution = np.maximum(solution + float(steps.min()) * (candidate - solution), 0.0)
            is_free &= solution > 1e-14
        solution = candidate
    raise ConfigError(f"no cost model was found for {len(targets)} steps in {_MAX_ROUNDS} rounds")


# The default model (SmolLM2-135M, Q4_1) on two AVX2 cores, within 10 % of what was measured: steps of 1, 8, 32, 64 and
# 128 decodes at contexts of 200 took 8.0, 20.7, 53.6, 100 and 200 ms, prompts of 64, 128, 512 and 2048 tokens 63, 125,
# 457 and 3300 ms.
TWO_CORES = CostModel(6.2e-3, (1.25e-3, 0.8e-3, 0.55e-3), 1.0e-6, 0.36e-3, (8, 128))

# A machine of the other kind, as an accelerator is: reading the weights takes 35 ms whatever the batch, some 32 tokens
# ride along nearly for free, then arithmetic is full. Not measured.
ACCELERATOR = CostModel(35e-3, (0.1e-3, 0.4e-3, 0.4e-3), 20e-9, 50e-6, (32, 512))

COST_MODELS = {"two-cores": TWO_CORES, "accelerator": ACCELERATOR}
