"""The steps in a decision log: what each computed, and how long it took. What a cost model is fitted to.

Knows no files and no scheduling.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.core.decision_log import CommitRecord, DecisionLog, PlanRecord
from ropeway.errors import ConfigError
from ropeway.sim.cost_model import CostModel, StepShape

WINDOW_S = 5.0  # within which a machine's speed hardly changes
MIN_STEPS_OF_WINDOW = 8
_NUM_TURNS = 12


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One computed step. begin_s: when it was planned; step_s: from there until its tokens were known.

    period_s: until the next step was planned, where that went on with a sequence of this one, so that nobody idled in
    between; what the server does around its steps is in it. None elsewhere.
    """

    shape: StepShape
    begin_s: float
    step_s: float
    period_s: float | None


def recorded_steps(log: DecisionLog) -> list[RecordedStep]:
    """Every step that was computed, in order. Raises DecisionLogError where the log is damaged."""
    steps: list[RecordedStep] = []
    planned: PlanRecord | None = None
    committed: tuple[PlanRecord, float] | None = None
    for record in log.records():
        if isinstance(record, PlanRecord):
            if committed is not None:
                steps.append(_step(*committed, record))
            planned, committed = record, None
        elif isinstance(record, CommitRecord) and planned is not None:
            committed = (planned, record.now_s)
            planned = None
    return steps if committed is None else [*steps, _step(*committed, None)]


def _step(record: PlanRecord, end_s: float, following: PlanRecord | None) -> RecordedStep:
    plan = record.plan
    assert plan is not None, "a commit without a plan"
    period_s = None
    if following is not None and following.plan is not None:
        goes_on = not set(plan.sequence_ids).isdisjoint(following.plan.sequence_ids)
        period_s = following.now_s - record.now_s if goes_on else None
    return RecordedStep(StepShape.of(plan), record.now_s, end_s - record.now_s, period_s)


@dataclass(frozen=True, slots=True)
class FittedMachine:
    """The machine behind recorded steps.

    noise: standard deviation of the logarithm of a step's time around its cost. slowness: of the machine in each window
    of WINDOW_S from start_s on, relative to its cost; a shared machine is now faster, now slower.
    """

    cost: CostModel
    noise: float
    slowness: tuple[float, ...]
    start_s: float

    def slowness_at(self, time_s: float) -> float:
        """At so many seconds; before and after the record it is that at its ends."""
        return self.slowness[_window(time_s - self.start_s, len(self.slowness))]


def fit_to(steps: Sequence[RecordedStep]) -> FittedMachine:
    """Costs and slowness in turns, each fitted to what the other leaves unexplained.

    A scheduler that paces by time makes smaller steps while the machine is slow, so all steps take alike, and costs
    fitted without the slowness would say that tokens are free.

    Raises ConfigError for fewer than 6 steps that others went on from.
    """
    timed = [(step.shape, step.begin_s, step.period_s) for step in steps if step.period_s is not None]
    if not timed:
        raise ConfigError("no step was followed by another that went on with it: there is nothing to fit")
    start_s, num_windows = timed[0][1], 1 + int((timed[-1][1] - timed[0][1]) / WINDOW_S)
    windows = [_window(begin_s - start_s, num_windows) for _, begin_s, _ in timed]
    shapes = [shape for shape, _, _ in timed]
    slowness = [1.0] * num_windows
    for _ in range(_NUM_TURNS):
        cost = CostModel.fit(
            shapes, [period_s / slowness[w] for (_, _, period_s), w in zip(timed, windows, strict=True)]
        )
        costs_s = [cost.step_s(shape) for shape in shapes]
        slowness = _slowness([period_s for _, _, period_s in timed], costs_s, windows, num_windows)
    errors = [
        math.log(period_s / (cost_s * slowness[window]))
        for (_, _, period_s), cost_s, window in zip(timed, costs_s, windows, strict=True)
    ]
    return FittedMachine(cost, statistics.pstdev(errors), tuple(slowness), start_s)


def _window(elapsed_s: float, num_windows: int) -> int:
    return min(max(0, int(elapsed_s / WINDOW_S)), num_windows - 1)


def _slowness(
    periods_s: Sequence[float], costs_s: Sequence[float], windows: Sequence[int], num_windows: int
) -> list[float]:
    """Of each window, all its time over all its costs; one with too few steps has that of the window before.

    Not the median of ratios: a few steps are far slower than the rest, and a machine of medians would be too fast.
    """
    taken_s, cost_s, count = [0.0] * num_windows, [0.0] * num_windows, [0] * num_windows
    for window, period_s, step_cost_s in zip(windows, periods_s, costs_s, strict=True):
        taken_s[window] += period_s
        cost_s[window] += step_cost_s
        count[window] += 1
    slowness, last = [], 1.0
    for window in range(num_windows):
        last = taken_s[window] / cost_s[window] if count[window] >= MIN_STEPS_OF_WINDOW else last
        slowness.append(last)
    return slowness
