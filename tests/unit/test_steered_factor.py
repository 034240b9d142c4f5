"""How long steps are planned to be, steered by how many were too long."""

from __future__ import annotations

import random

import pytest

from ropeway.core.steered_factor import SteeredFactor, Tail

TAIL = Tail(2.3, start=1.95, least=1.7, most=2.2)


@pytest.mark.parametrize(("deviation", "bias"), [(0.03, 1.0), (0.06, 1.0), (0.08, 1.0), (0.06, 0.9), (0.06, 1.1)])
def test_one_step_in_a_hundred_is_beyond_the_limit(deviation: float, bias: float) -> None:
    """However far steps stray from their plan, and whatever all of them are off by."""
    rng, factor = random.Random(1), SteeredFactor(TAIL)
    times = []
    for _ in range(20_000):
        times.append(factor.value * bias * rng.lognormvariate(0.0, deviation))
        factor.observe(times[-1])
    late = sorted(times[2_000:])
    p99 = late[len(late) * 99 // 100]
    if TAIL.least < factor.value < TAIL.most:
        assert p99 == pytest.approx(TAIL.limit, rel=0.02)
    else:
        assert factor.value == TAIL.most and p99 < TAIL.limit, "steps are longer only where they may be"


def test_it_stays_within_its_bounds() -> None:
    for times, bound in ((0.5, TAIL.most), (9.0, TAIL.least)):
        factor = SteeredFactor(TAIL)
        for _ in range(1_000):
            factor.observe(times)
        assert factor.value == bound
