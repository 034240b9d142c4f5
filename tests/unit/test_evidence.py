"""Short forms of the experiments in virtual time: the same code, smaller loads, so that they cannot rot."""

from __future__ import annotations

from pathlib import Path

import pytest

import fairness
import no_collapse
import replay_hour
import slo
from harness.virtual import percentile, prior_of, verdict
from ropeway.sim.cost_model import COST_MODELS, TWO_CORES
from ropeway.sim.simulator import simulate

MACHINE = "two-cores"


def test_predictive_admission_does_not_collapse() -> None:
    load = no_collapse.Load(num_clients=64, num_requests=330, seed=0)
    at = {"machine": MACHINE, "num_clients": load.num_clients, "num_requests": load.num_requests, "seed": load.seed}
    figures = {
        (admission, limit): no_collapse.measure({**at, "admission": admission, "limit": limit})
        for admission, limit in (("predictive", 64), ("optimistic", 64), ("optimistic", 12), ("reserve", 64))
    }
    ours = figures["predictive", 64]
    assert ours["output_tokens_per_s"] >= 0.93 * max(f["output_tokens_per_s"] for f in figures.values())
    assert ours["recomputed_share"] <= 0.03 < figures["optimistic", 64]["recomputed_share"]
    assert figures["reserve", 64]["num_preemptions"] == 0


def test_one_who_asks_seldom_is_served_soon_beside_a_flood() -> None:
    at = {"machine": MACHINE, "num_quiet": 20, "seed": 0}
    alone, flooded, queued = (
        fairness.measure({**at, "policy": policy, "is_flooded": is_flooded})
        for policy, is_flooded in (("vtc", False), ("vtc", True), ("fcfs", True))
    )
    assert flooded["ttft_p99_s"] <= 2 * alone["ttft_p99_s"] + 3 * flooded["median_step_s"]
    assert queued["ttft_p50_s"] > 10 * flooded["ttft_p50_s"]


@pytest.mark.parametrize("machine", sorted(COST_MODELS))
def test_a_target_for_the_time_per_token_is_held(machine: str) -> None:
    target_s = 4 * slo.unloaded_tpot_s(machine)
    rate = {"two-cores": 2.0, "accelerator": 6.0}[machine]
    at = {"kind": "steered", "machine": machine, "target_s": target_s, "seed": 0, "num_windows": 6}
    calm, flooded = (slo.measure({**at, "rate": factor * rate}) for factor in (1, 4))
    assert calm["windows_within"] == 1.0 and calm["num_refused"] == 0
    assert flooded["windows_within"] >= 0.9 and flooded["num_refused"] > 0
    assert calm["goodput_share"] > 0.95 > flooded["goodput_share"]


def test_the_best_fixed_setting_is_the_fastest_that_meets_the_target() -> None:
    points = slo.grid_points((MACHINE,), (2, 8), (8, 64))
    document = {"points": [{"point": dict(point), **slo.measure(point)} for point in points]}
    assert slo.best_fixed(document, MACHINE, 1.0)["point"]["max_num_seqs"] == 8
    assert slo.best_fixed(document, MACHINE, 0.02)["point"]["max_num_seqs"] == 2


def test_mixed_traffic_replays(tmp_path: Path) -> None:
    simulation = replay_hour.record(tmp_path / "run.log", 60.0, seed=1)
    result = replay_hour.replay(tmp_path / "run.log")
    assert result["is_identical"] and result["stats"] == simulation.engine.stats()
    assert all(result["num_finished"][reason] for reason in ("stop", "length", "abort")) and result["num_prefix_hits"]


def test_a_run_in_virtual_time_repeats() -> None:
    load = no_collapse.Load(num_clients=32, num_requests=48, seed=3)
    recipe = no_collapse.recipe_for(load, "predictive", 32, prior_of(TWO_CORES))
    runs = [no_collapse.drive(simulate(recipe.make(), TWO_CORES, noise=0.1, seed=5), load) for _ in range(2)]
    assert runs[0] == runs[1]


def test_percentiles_are_values_that_were_measured() -> None:
    assert [percentile(range(1, 101), share) for share in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert percentile([7.0], 0.99) == 7.0


def test_a_verdict_says_whether_its_target_holds() -> None:
    assert verdict("x", 1.0, 1.0, is_at_most=True)["holds"] and verdict("x", 1.0, 1.0, is_at_most=False)["holds"]
    assert not verdict("x", 1.1, 1.0, is_at_most=True)["holds"]
