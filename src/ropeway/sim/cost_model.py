"""How long a step takes, from the shape of its plan. Knows no model, machine or clock; fitted to measured steps.

The simulator's own truth about step times: the scheduler never sees it, and what it learns online is judged by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import numpy.typing as npt

from ropeway.core.plan import StepPlan
from ropeway.errors import ConfigError

_MAX_SWEEPS = 20_000
_TOLERANCE = 1e-9
_NUM_REWEIGHTINGS = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on.

    num_tokens: computed. num_pairs: query-key pairs of attention. num_rows: of logits, one per sampled sequence.
    """

    num_tokens: int
    num_pairs: int
    num_rows: int

    @staticmethod
    def of(plan: StepPlan) -> StepShape:
        """The shape of a plan. A row of n tokens from position p has n·p + n(n+1)/2 pairs."""
        starts, counts = plan.starts, plan.num_tokens
        num_tokens = sum(counts)
        if num_tokens == len(counts):
            return StepShape(num_tokens, sum(starts) + num_tokens, sum(plan.is_sampled))
        num_pairs = sum([n * start + n * (n + 1) // 2 for start, n in zip(starts, counts, strict=True)])
        return StepShape(num_tokens, num_pairs, sum(plan.is_sampled))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: fixed + tokens, priced in three ranges + pairs + rows.

    Tokens cost token_s[0] each up to knots[0], token_s[1] up to knots[1], token_s[2] beyond: on a processor the first
    few tokens pay for reading the weights, on an accelerator tokens are nearly free until its arithmetic is full.
    """

    fixed_s: float
    token_s: tuple[float, float, float]
    pair_s: float
    row_s: float
    knots: tuple[int, int] = (8, 128)

    def __post_init__(self) -> None:
        if min(self.fixed_s, *self.token_s, self.pair_s, self.row_s) < 0:
            raise ConfigError(f"a cost must be at least 0 seconds: {astuple(self)}")
        if not 0 < self.knots[0] < self.knots[1]:
            raise ConfigError(f"the knots {self.knots} must be above 0 and ascend")

    def step_s(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes."""
        num_tokens, (low, high) = shape.num_tokens, self.knots
        first_s, middle_s, last_s = self.token_s
        seconds = self.fixed_s + self.pair_s * shape.num_pairs + self.row_s * shape.num_rows
        if num_tokens <= low:
            return seconds + first_s * num_tokens
        seconds += first_s * low
        if num_tokens <= high:
            return seconds + middle_s * (num_tokens - low)
        return seconds + middle_s * (high - low) + last_s * (num_tokens - high)

    def scaled(self, factor: float) -> CostModel:
        """The same machine, `factor` times as slow."""
        fixed_s, token_s, pair_s, row_s = self.fixed_s, self.token_s, self.pair_s, self.row_s
        first_s, middle_s, last_s = token_s
        return replace(
            self,
            fixed_s=fixed_s * factor,
            token_s=(first_s * factor, middle_s * factor, last_s * factor),
            pair_s=pair_s * factor,
            row_s=row_s * factor,
        )

    @staticmethod
    def fit(shapes: Sequence[StepShape], times_s: Sequence[float], knots: tuple[int, int] = (8, 128)) -> CostModel:
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
        fixed_s, *token_s, pair_s, row_s = costs.tolist()
        first_s, middle_s, last_s = token_s
        return CostModel(fixed_s, (first_s, middle_s, last_s), pair_s, row_s, knots)


def _features(shapes: Sequence[StepShape], knots: tuple[int, int]) -> npt.NDArray[np.float64]:
    tokens, pairs, rows = np.array([astuple(shape) for shape in shapes], dtype=np.float64).T
    first = np.minimum(tokens, knots[0])
    middle = np.clip(tokens - knots[0], 0, knots[1] - knots[0])
    return np.stack([np.ones(len(tokens)), first, middle, np.maximum(tokens - knots[1], 0), pairs, rows], axis=1)


def _nonnegative_least_squares(
    features: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Coordinate descent on the normal equations, each coordinate held at 0 or above; columns scaled to length 1."""
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    scaled = features / scale
    gram, moment = scaled.T @ scaled, scaled.T @ targets
    solution = np.zeros(features.shape[1])
    for _ in range(_MAX_SWEEPS):
        largest = 0.0
        for index in range(len(solution)):
            if gram[index, index] == 0:
                continue
            step = (moment[index] - gram[index] @ solution) / gram[index, index]
            new = max(0.0, solution[index] + step)
            largest = max(largest, abs(new - solution[index]))
            solution[index] = new
        if largest <= _TOLERANCE * max(1.0, float(solution.max())):
            break
    return np.asarray(solution / scale)


# The default model (SmolLM2-135M, Q4_1) on two AVX2 cores, within 10 % of what was measured: steps of 1, 8, 32, 64 and
# 128 decodes at contexts of 200 took 8.0, 20.7, 53.6, 100 and 200 ms, prompts of 64, 128, 512 and 2048 tokens 63, 125,
# 457 and 3300 ms.
TWO_CORES = CostModel(6.2e-3, (1.25e-3, 0.8e-3, 0.55e-3), 1.0e-6, 0.36e-3, (8, 128))

# A machine of the other kind, as an accelerator is: reading the weights takes 35 ms whatever the batch, some 32 tokens
# ride along nearly for free, then arithmetic is full. Not measured.
ACCELERATOR = CostModel(35e-3, (0.1e-3, 0.4e-3, 0.4e-3), 20e-9, 50e-6, (32, 512))

COST_MODELS = {"two-cores": TWO_CORES, "accelerator": ACCELERATOR}
