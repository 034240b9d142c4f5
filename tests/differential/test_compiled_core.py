"""The scheduler compiled against the scheduler as it is written: what one chose the other chooses, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import ropeway.core.scheduler
from ropeway._written_core import VARIABLE, is_interpreted
from ropeway.core.recipe import SchedulerRecipe
from support.eventful_run import COSTS, RECIPE, record

PACED = replace(RECIPE, **COSTS)  # type: ignore[arg-type]
REPLAY = """
import sys
from pathlib import Path
from ropeway.core import scheduler
from ropeway.core.decision_log import DecisionLog
from ropeway.sim.replay import Replay
assert scheduler.__file__.endswith(".py"), scheduler.__file__
for name in sys.argv[1:]:
    print(sum(1 for _ in Replay(DecisionLog(Path(name).read_bytes())).run()))
"""


def recipes() -> list[SchedulerRecipe]:
    """Every policy and admission, objectives, targets, and static batching."""
    pairs = product(("vtc", "fcfs", "priority", "spf"), ("predictive", "reserve", "optimistic"))
    return [
        *(replace(PACED, scheduling_policy=policy, admission=admission) for policy, admission in pairs),
        replace(PACED, objective="latency"),
        replace(PACED, objective="throughput", has_prefix_cache=False),
        replace(PACED, slo_tpot_s=0.03, slo_ttft_s=20.0),
        replace(PACED, num_layers=8, step_read_s=1e-4),  # chunks that grow dear go in waves
        replace(RECIPE, batching="static"),
        replace(RECIPE, batching="static-padded"),
    ]


def test_what_is_tested_here_is_compiled() -> None:
    if is_interpreted():
        pytest.skip(f"{VARIABLE} is set: what is written runs")
    assert not ropeway.core.scheduler.__file__.endswith(".py")


def test_what_is_written_chooses_the_same(tmp_path: Path) -> None:
    files, expected = [], []
    for seed, recipe in enumerate(recipes()):
        records, data = record(recipe, seed=seed)
        files.append(tmp_path / f"{seed}.log")
        files[-1].write_bytes(data)
        expected.append(len(records))
    assert min(expected) > 100
    environment = {**os.environ, VARIABLE: "1"}
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, *files], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == expected
