"""Steps read back from a decision log: their shapes, their times, and the machine that is fitted to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ropeway.core.decision_log import DecisionLog, LogEncoder, Record
from ropeway.core.recipe import SchedulerRecipe
from ropeway.engine.decision_recorder import DecisionRecorder, RecordingHasher
from ropeway.engine.engine import Engine
from ropeway.sim.cost_model import CostModel, StepShape
from ropeway.sim.recorded_steps import fit_to, recorded_steps
from ropeway.sim.simulator import AnswerLengths, Lengths, ScriptedRunner, Simulation, VirtualClock, make_arrival

RECIPE = SchedulerRecipe(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_kv_blocks=200)
# Steps up at the ninth token, as a kernel of tiles does; a decode reads its cache at twice the price of a chunk.
MACHINE = CostModel(4e-3, (1e-3, 6e-3, 0.5e-3), 2e-6, 0.3e-3, (8, 9), lone_pair_s=2e-6)


def recorded(noise: float = 0.0, slowness: Callable[[float], float] | None = None, **paced: float) -> DecisionLog:
    """Bursts of requests with pauses in between. paced: fields of the recipe."""
    recipe = replace(RECIPE, **paced)  # type: ignore[arg-type]
    records: list[Record] = []
    clock, lengths = VirtualClock(50.0), AnswerLengths()
    runner = ScriptedRunner(clock, MACHINE, lengths, noise=noise, slowness=slowness)
    recorder = DecisionRecorder(records.append, b"key")
    scheduler = recipe.make(RecordingHasher(recipe.block_size, recorder.note_hash))
    simulation = Simulation(Engine(scheduler, runner, clock, recorder), lengths, clock)
    simulation.run(
        make_arrival(n, 50.0 + 4.0 * (n // 12), Lengths(5 + 17 * n % 90, 1 + 13 * n % 40, 60)) for n in range(60)
    )
    encoder = LogEncoder()
    return DecisionLog(b"".join([encoder.header(recipe.to_values()), *map(encoder.encode, records)]))


def test_a_log_tells_the_shape_and_the_time_of_every_step() -> None:
    steps = recorded_steps(recorded())
    assert steps[0].begin_s == 50.0 and len(steps) > 100
    assert all(step.step_s == pytest.approx(MACHINE.step_s(step.shape)) for step in steps)
    assert any(step.shape.num_lone_pairs not in (0, step.shape.num_pairs) for step in steps)  # decodes beside a chunk


def test_a_pause_is_no_part_of_a_period() -> None:
    steps = recorded_steps(recorded())
    assert all(step.period_s is None or step.period_s == pytest.approx(step.step_s) for step in steps)
    assert 5 <= sum(step.period_s is None for step in steps) < 20  # at least the last one of each burst


def test_the_machine_and_its_noise_are_found_again() -> None:
    machine = fit_to(recorded_steps(recorded(noise=0.05)))
    cost, noise = machine.cost, machine.noise
    assert noise == pytest.approx(0.05, rel=0.2)
    for shape in (StepShape(1, 40, 1, 40), StepShape(8, 320, 8, 320), StepShape(40, 1_000, 4, 160)):
        assert cost.step_s(shape) == pytest.approx(MACHINE.step_s(shape), rel=0.05)


def test_a_machine_that_slows_down_is_told_from_one_whose_steps_are_dear() -> None:
    """Paced by time, steps shrink as the machine slows down: all take alike, and tokens would seem to be free."""
    log = recorded(
        0.05,
        lambda now_s: 1.0 if now_s < 60.0 else 1.4,
        **{"step_fixed_s": 8e-3, "step_token_s": 0.5e-3, "step_later_token_s": 0.5e-3, "slo_tpot_s": 0.03},
    )
    machine = fit_to(recorded_steps(log))
    assert machine.slowness_at(68.0) / machine.slowness_at(52.0) == pytest.approx(1.4, rel=0.07)
    early = machine.slowness_at(52.0)
    for shape in (StepShape(2, 100, 2, 100), StepShape(12, 500, 3, 120), StepShape(20, 900, 3, 120)):
        assert early * machine.cost.step_s(shape) == pytest.approx(MACHINE.step_s(shape), rel=0.1)
    assert machine.slowness_at(0.0) == machine.slowness[0] and machine.slowness_at(1e6) == machine.slowness[-1]
