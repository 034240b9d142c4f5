"""The steps in a decision log: what each computed, and how long it took. What a cost model is fitted to.

Knows no files and no scheduling.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.core.decision_log import CommitRecord, DecisionLog, PlanRecord
from ropeway.sim.cost_model import CostModel, StepShape


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


def fit_to(steps: Sequence[RecordedStep]) -> tuple[CostModel, float]:
    """The machine behind recorded steps, and its noise: the deviation of the logarithm of a period from its cost.

    Raises ConfigError for fewer than 6 steps that others went on from.
    """
    shapes = [step.shape for step in steps if step.period_s is not None]
    periods_s = [step.period_s for step in steps if step.period_s is not None]
    cost = CostModel.fit(shapes, periods_s)
    errors = [math.log(seconds / cost.step_s(shape)) for shape, seconds in zip(shapes, periods_s, strict=True)]
    return cost, statistics.pstdev(errors)
