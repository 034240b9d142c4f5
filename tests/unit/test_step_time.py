"""The step-time model against steps of known costs: noise, outliers, steps that cannot tell costs apart, new speeds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway.core.step_time import (
    KNEE_TOKENS,
    NO_COSTS,
    StepCosts,
    StepTimeModel,
    StepWork,
    fit_step_costs,
    num_pairs,
)

TRUE = StepCosts(6e-3, 9e-4, 6e-4, 7e-7, 6e-4)
WRONG = StepCosts(4e-3, 1.5e-3, 1.5e-3, 0.0, 2e-4)


def mixed_step(rng: random.Random) -> StepWork:
    """Decodes, and in half of the steps a chunk of a prompt."""
    num_decodes, chunk = rng.choice([1, 4, 16, 32]), rng.choice([0, 0, 0, 16, 64, 200, 400])
    pairs = num_decodes * 300 + num_pairs(rng.randint(10, 3000), chunk)
    return StepWork(num_decodes + chunk, pairs, num_decodes + (chunk > 0))


def decode_step(rng: random.Random) -> StepWork:
    num_decodes = rng.randint(1, 32)
    return StepWork(num_decodes, num_decodes * 300, num_decodes)


def run(
    model: StepTimeModel,
    num_steps: int,
    *,
    make: Callable[[random.Random], StepWork] = mixed_step,
    noise: float = 0.0,
    outliers: float = 0.0,
    speed: float = 1.0,
    seed: int = 0,
) -> list[float]:
    """Feeds the model; the relative error of each prediction against the truth without its noise."""
    rng = random.Random(seed)
    errors = []
    for _ in range(num_steps):
        work = make(rng)
        true_s = TRUE.seconds(work) * speed
        errors.append(model.costs.seconds(work) / true_s - 1)
        disturbed = rng.uniform(2, 6) if rng.random() < outliers else 1.0
        model.observe(work, true_s * max(0.1, 1 + rng.gauss(0, noise)) * disturbed)
        costs = model.costs
        assert min(costs.fixed_s, costs.token_s, costs.later_token_s, costs.pair_s, costs.row_s) >= 0
    return errors


def rms(errors: list[float]) -> float:
    return (sum(error * error for error in errors) / len(errors)) ** 0.5


@pytest.mark.parametrize(("noise", "outliers", "most"), [(0.0, 0.0, 0.005), (0.05, 0.0, 0.04), (0.1, 0.05, 0.1)])
def test_costs_are_learned_from_noisy_steps(noise: float, outliers: float, most: float) -> None:
    model = StepTimeModel(WRONG)
    errors = run(model, 600, noise=noise, outliers=outliers)
    assert rms(errors[:10]) > 0.15
    assert rms(errors[-200:]) < most


def test_each_cost_is_recovered_where_steps_tell_them_apart() -> None:
    model = StepTimeModel(WRONG)
    run(model, 1500, noise=0.01)
    for name in ("fixed_s", "token_s", "later_token_s", "pair_s", "row_s"):
        assert getattr(model.costs, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name


def test_one_outlier_moves_little() -> None:
    model = StepTimeModel(TRUE)
    run(model, 200, noise=0.02)
    work = StepWork(8, 2400, 8)
    before_s = model.costs.seconds(work)
    model.observe(work, 20 * before_s)
    assert model.costs.seconds(work) < 1.2 * before_s


@pytest.mark.parametrize("speed", [2.0, 0.5])
def test_a_new_speed_is_believed_within_twenty_steps(speed: float) -> None:
    model = StepTimeModel(WRONG)
    run(model, 300, noise=0.05)
    run(model, 20, noise=0.05, speed=speed, seed=1)
    assert rms(run(model, 50, noise=0.05, speed=speed, seed=2)) < 0.1


def test_decodes_alone_scale_the_other_costs_along() -> None:
    """Decodes have as many tokens as rows, so they cannot tell what a prompt costs; a slower machine slows that too."""
    model = StepTimeModel(TRUE)
    run(model, 400, make=decode_step, noise=0.03)
    chunk = StepWork(64, num_pairs(0, 64), 1)
    assert model.costs.seconds(chunk) == pytest.approx(TRUE.seconds(chunk), rel=0.15)
    run(model, 400, make=decode_step, noise=0.03, speed=2.0)
    assert model.costs.seconds(chunk) == pytest.approx(2 * TRUE.seconds(chunk), rel=0.25)


def test_the_same_steps_give_the_same_bits() -> None:
    models = [StepTimeModel(WRONG), StepTimeModel(WRONG)]
    for model in models:
        run(model, 100, noise=0.1, outliers=0.1)
    assert models[0].costs == models[1].costs


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 10**7), st.integers(0, 256), st.floats(1e-6, 1e3)), max_size=60
    )
)
def test_no_steps_make_a_cost_negative_or_infinite(steps: list[tuple[int, int, int, float]]) -> None:
    model = StepTimeModel(WRONG)
    for num_tokens, pairs, num_rows, step_s in steps:
        model.observe(StepWork(num_tokens, pairs, num_rows), step_s)
        costs = model.costs
        for cost in (costs.fixed_s, costs.token_s, costs.later_token_s, costs.pair_s, costs.row_s):
            assert 0 <= cost < 1e9


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(0, 100_000),
    before=st.integers(0, 2 * KNEE_TOKENS),
    left_s=st.floats(0, 3),
    token_s=st.floats(0, 1e-2),
    later_token_s=st.floats(0, 1e-2),
    pair_s=st.floats(0, 1e-5),
    read_s=st.floats(0, 4e-5),
    is_more=st.booleans(),
)
def test_a_chunk_is_the_longest_that_fits(
    start: int,
    before: int,
    left_s: float,
    token_s: float,
    later_token_s: float,
    pair_s: float,
    read_s: float,
    is_more: bool,
) -> None:
    costs = StepCosts(1e-3, token_s, later_token_s, pair_s, 0.0, read_s)
    work = StepWork(before, before, before, before)
    num_tokens = costs.num_chunk_tokens(work, start, left_s, is_more=is_more)

    def added_s(count: int) -> float:
        num_reads = count if is_more else start + count
        more = StepWork(before + count, before + num_pairs(start, count), before, before + num_reads)
        return costs.seconds(more) - costs.seconds(work)

    if num_tokens < 1 << 20:
        assert not num_tokens or added_s(num_tokens) <= left_s * (1 + 1e-6) + 1e-9
        assert added_s(num_tokens + 1) >= left_s * (1 - 1e-6) - 1e-9


def test_fitting_finds_costs_and_leaves_out_what_no_step_had() -> None:
    works = [
        StepWork(1, 16, 1),
        StepWork(64, 2080, 1),
        StepWork(16, 17_000, 1),
        StepWork(16, 256, 16),
        StepWork(512, num_pairs(0, 512), 1),
    ]
    fitted = fit_step_costs([(work, TRUE.seconds(work)) for work in works])
    for name in ("fixed_s", "token_s", "later_token_s", "pair_s", "row_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    below = fit_step_costs([(work, TRUE.seconds(work)) for work in works[:4]])
    assert below.later_token_s == below.token_s > 0


def test_no_costs_cost_nothing() -> None:
    assert NO_COSTS.seconds(StepWork(1000, 1000, 1000)) == 0.0


@pytest.mark.parametrize("name", ["fixed_s", "token_s", "later_token_s", "pair_s", "row_s"])
def test_one_cost_alone_is_a_prior_too(name: str) -> None:
    costs = {each: 0.0 for each in ("fixed_s", "token_s", "later_token_s", "pair_s", "row_s")} | {name: 1e-4}
    model = StepTimeModel(StepCosts(**costs))
    for _ in range(20):
        model.observe(StepWork(8, 64, 8), 0.01)
    assert all(cost >= 0 for cost in (model.costs.fixed_s, model.costs.token_s, model.costs.row_s))
