"""Virtual time: what a step costs, when requests come, where answers end, with the real engine inside."""

from __future__ import annotations

import random

import pytest

from ropeway.core.plan import LayerSlice, StepPlan
from ropeway.core.recipe import SchedulerRecipe
from ropeway.errors import ConfigError
from ropeway.sim.cost_model import ACCELERATOR, TWO_CORES, CostModel, StepShape
from ropeway.sim.simulator import Arrival, Lengths, Passage, Simulation, SimulationStalledError, make_arrival, simulate
from support.scheduling import make_scheduler
from support.stand_in import StandIn

PER_STEP = CostModel(1.0, (0.0, 0.0, 0.0), 0.0, 0.0)
MEASURED_MS = [  # shape, milliseconds: the default model on two cores, contexts of 200 where it decodes
    (StepShape(1, 200, 1), 8.0),
    (StepShape(8, 1_600, 8), 20.7),
    (StepShape(32, 6_400, 32), 53.6),
    (StepShape(64, 12_800, 64), 100.0),
    (StepShape(128, 25_600, 128), 200.0),
    (StepShape(64, 2_080, 1), 63.0),
    (StepShape(128, 8_256, 1), 125.0),
    (StepShape(512, 131_328, 1), 457.0),
    (StepShape(2_048, 2_098_176, 1), 3_300.0),
]


def simulation(cost: CostModel = PER_STEP, **options: int) -> Simulation:
    return simulate(make_scheduler(**options), cost, keeps_token_times=True)


def arrival(number: int, arrival_s: float, *, prompt: int = 4, output: int = 3, max_tokens: int = 50) -> Arrival:
    return make_arrival(number, arrival_s, Lengths(prompt, output, max_tokens))


@pytest.mark.parametrize(("shape", "measured_ms"), MEASURED_MS)
def test_the_default_costs_are_those_measured(shape: StepShape, measured_ms: float) -> None:
    assert TWO_CORES.step_s(shape) * 1e3 == pytest.approx(measured_ms, rel=0.1)


def test_a_shape_counts_the_pairs_of_a_plan() -> None:
    scheduler = make_scheduler(budget=6)
    scheduler.add(arrival(0, 0.0, prompt=4).request, 0.0)
    scheduler.add(arrival(1, 0.0, prompt=5).request, 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.num_tokens == (4, 2)
    assert StepShape.of(plan) == StepShape(6, (1 + 2 + 3 + 4) + (1 + 2), 1, 0)


@pytest.mark.parametrize("truth", [TWO_CORES, ACCELERATOR])
def test_a_fit_finds_the_costs_behind_noisy_steps(truth: CostModel) -> None:
    draw = random.Random(0)
    shapes = [
        StepShape(tokens, tokens * draw.randint(1, 4_000), draw.randint(1, tokens))
        for tokens in (draw.choice((1, 4, 8, 20, 60, 128, 300, 512, 1_000)) for _ in range(400))
    ]
    times_s = [truth.step_s(shape) * draw.lognormvariate(0.0, 0.02) for shape in shapes]
    fitted = CostModel.fit(shapes, times_s, truth.knots)
    for shape in shapes:
        assert fitted.step_s(shape) == pytest.approx(truth.step_s(shape), rel=0.05)


def test_a_fit_gives_the_right_sum_where_one_step_in_ten_is_slow() -> None:
    draw = random.Random(1)
    shapes = [StepShape(n, 200 * n, n) for n in (1 + draw.randrange(64) for _ in range(600))]
    times_s = [TWO_CORES.step_s(shape) * draw.choice((1,) * 9 + (4,)) for shape in shapes]
    fitted = CostModel.fit(shapes, times_s)
    assert sum(map(fitted.step_s, shapes)) == pytest.approx(sum(times_s), rel=0.03)


def test_a_fit_never_gives_a_negative_cost() -> None:
    shapes = [StepShape(n, 10 * n, 1) for n in range(1, 20)]
    fitted = CostModel.fit(shapes, [1.0 / n for n in range(1, 20)])  # falls with the tokens
    assert min(fitted.fixed_s, *fitted.token_s, fitted.pair_s, fitted.row_s) >= 0


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 6"):
        CostModel.fit([StepShape(1, 1, 1)] * 5, [1.0] * 5)
    with pytest.raises(ConfigError, match="at least 0"):
        CostModel(-1.0, (0.0, 0.0, 0.0), 0.0, 0.0)


def test_answers_end_where_they_were_scripted_to_and_time_is_what_steps_cost() -> None:
    sim = simulation()
    sim.run([arrival(0, 10.0, output=3), arrival(1, 10.5, output=1), arrival(2, 11.0, output=60)])
    first, second, third = sim.passages
    assert (first.num_output_tokens, first.finish_reason, first.token_times_s) == (3, "stop", [11.0, 12.0, 13.0])
    assert (second.started_s, second.ttft_s, second.tpot_s) == (11.0, 1.5, None)
    assert (third.num_output_tokens, third.finish_reason) == (50, "length")
    assert first.tpot_s == 1.0 and sim.clock() == 61.0


def test_preempted_answers_keep_their_length() -> None:
    sim = simulation(num_blocks=6, block_size=2)
    sim.run([arrival(number, 0.0, prompt=2, output=6 + number, max_tokens=10) for number in range(4)])
    assert sim.engine.stats().num_preemptions > 0
    assert [passage.num_output_tokens for passage in sim.passages] == [6, 7, 8, 9]


def test_a_closed_loop_sends_the_next_request_when_the_last_is_over() -> None:
    sim = simulation()

    def follow_up(passage: Passage) -> Arrival | None:
        number = int(passage.arrival.request.request_id) + 1
        return arrival(number, sim.clock() + 2.0) if number < 5 else None

    sim.run([arrival(0, 0.0)], follow_up=follow_up)
    assert [passage.arrival.arrival_s for passage in sim.passages] == [0.0, 5.0, 10.0, 15.0, 20.0]


def test_a_closed_loop_goes_on_where_clients_are_refused() -> None:
    recipe = SchedulerRecipe(
        max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_kv_blocks=64, max_num_queued_reqs=1
    )
    sim = simulate(recipe.make(), PER_STEP)

    def follow_up(passage: Passage) -> Arrival | None:
        number = int(passage.arrival.request.request_id) + 4
        return arrival(number, passage.end_s or 0.0) if number < 40 else None

    sim.run([arrival(number, 0.0) for number in range(4)], follow_up=follow_up)
    assert len(sim.passages) == 40 and {passage.finish_reason for passage in sim.passages} == {None, "stop"}
    for client in range(4):
        passages = [passage for passage in sim.passages if int(passage.arrival.request.request_id) % 4 == client]
        assert len(passages) == 10
        for passage, following in zip(passages, passages[1:], strict=False):
            came_s, end_s = following.end_s, passage.end_s
            assert not passage.is_refused or (came_s is not None and end_s is not None and came_s >= end_s + 1.0)


def test_a_simulation_can_be_cut_off_and_gone_on_with() -> None:
    sim = simulation()
    sim.run([arrival(0, 0.0, output=8)], until_s=4.0)
    assert sim.clock() == 4.0 and sim.passages[0].finish_reason is None
    sim.run([])
    assert sim.passages[0].num_output_tokens == 8


def test_the_same_seed_gives_the_same_noise() -> None:
    def end_s(seed: int) -> float:
        sim = simulate(make_scheduler(), TWO_CORES, noise=0.2, seed=seed)
        sim.run([arrival(0, 0.0, output=40)])
        return sim.clock()

    assert end_s(1) == end_s(1) != end_s(2)


def test_clients_leave_and_texts_end() -> None:
    sim = simulation()

    def on_step(sim: Simulation) -> None:
        if sim.clock() == 3.0:
            sim.abort("0")
            sim.stop("1", 0)

    sim.run([arrival(0, 0.0, output=9), arrival(1, 0.0, output=9), arrival(2, 0.0, output=9)], on_step=on_step)
    assert [(p.finish_reason, p.num_output_tokens, p.end_s) for p in sim.passages] == [
        ("abort", 3, 3.0),
        ("stop", 3, 3.0),
        ("stop", 9, 9.0),
    ]


class Hanging(StandIn):
    def plan(self, now_s: float) -> None:
        return None


def test_a_scheduler_that_hangs_is_an_error_and_not_an_endless_loop() -> None:
    sim = simulate(Hanging(make_scheduler()), PER_STEP)
    with pytest.raises(SimulationStalledError, match="1 wait"):
        sim.run([arrival(0, 0.0), arrival(1, 5.0)][:1])


def test_no_two_prompts_begin_alike_and_all_are_within_a_vocabulary() -> None:
    prompts = [
        arrival(number, 0.0, prompt=40).request.prompt_token_ids for number in (*range(0, 40_000, 97), 5, 16_389)
    ]
    assert len({prompt[:4] for prompt in prompts}) == len(prompts)
    assert all(len(prompt) == 40 and 0 < min(prompt) and max(prompt) < 32_000 for prompt in prompts)
    assert len(arrival(7, 0.0, prompt=1).request.prompt_token_ids) == 1


def test_a_slice_costs_its_share_of_the_chunk() -> None:
    """Beside a decode at position 30, a chunk of 12 behind 100: a row of logits comes with the last slice only."""
    plan = StepPlan(0, (0, 1), (30, 100), (1, 12), (True, False), (), layer_slice=LayerSlice(1, 4))
    whole = StepShape.of(plan._replace(layer_slice=None))
    assert whole == StepShape(13, 31 + 1278, 1, 31)
    assert StepShape.of(plan) == StepShape(1 + 3, 31 + 1278 / 4, 1, 31)
