"""One point of an experiment on a real server over HTTP, and again in virtual time on a machine fitted to that run.

`ropeway serve` runs with the default model and writes its decision log. The log must replay to the same schedule; the
times of its steps give the machine; its header gives the scheduler, calibrated as it was. Knows no experiment.
"""

from __future__ import annotations

import bisect
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.processes import free_port, running_server
from harness.results import new_document, result_path
from harness.served_load import ServedLoad
from harness.virtual import tell, verdict
from ropeway.catalog import DEFAULT_MODEL
from ropeway.core.decision_log import CommitRecord, DecisionLog
from ropeway.core.recipe import SchedulerRecipe
from ropeway.core.stats import EngineStats
from ropeway.sim.recorded_steps import FittedMachine, fit_to, recorded_steps
from ropeway.sim.replay import Replay
from ropeway.sim.simulator import Arrival, FollowUp, Passage, simulate

MOST_APART = 0.15
READY_TIMEOUT_S = 120.0
NUM_VIRTUAL_RUNS = 5  # with other noise each; a figure is the median of theirs
# Fields of a recipe and their flags; the rest of it must come out of the server as it was asked for.
FLAGS = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len",
    "num_kv_blocks": "--num-kv-blocks",
    "admission": "--admission",
    "scheduling_policy": "--scheduling-policy",
    "objective": "--objective",
}
TARGET_FLAGS = {"slo_ttft_s": "--slo-ttft-ms", "slo_tpot_s": "--slo-tpot-ms"}


class World(Protocol):
    """Where a load is driven: a simulation, or the clients of a server."""

    passages: list[Passage]

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def open_ids(self) -> list[str]: ...

    def clock(self) -> float: ...

    def run(
        self,
        arrivals: Iterable[Arrival],
        *,
        follow_up: FollowUp | None = None,
        until_s: float | None = None,
        on_step: Callable[[Any], None] | None = None,
    ) -> None: ...

    def abort(self, request_id: str) -> None: ...


Drive = Callable[[World], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ServedRun:
    """What a load on a server left behind. figures: of its clients. stats: of its scheduler, from the replayed log.

    start_s: when the load began, on the machine's clock. turnaround_s: from the commit of an answer's last token until
    its client knew, and as long again for its next request: in the middle.
    """

    figures: dict[str, Any]
    recipe: SchedulerRecipe
    log: bytes
    stats: EngineStats
    machine: FittedMachine
    start_s: float
    turnaround_s: float

    def repeat(self, drive: Drive) -> tuple[dict[str, Any], EngineStats]:
        """The same load in virtual time: the median of each figure over runs with other noise, and the last stats."""
        runs = []
        for seed in range(NUM_VIRTUAL_RUNS):
            world = simulate(
                self.recipe.make(),
                self.machine.cost,
                noise=self.machine.noise,
                seed=seed,
                turnaround_s=self.turnaround_s,
                slowness=lambda now_s: self.machine.slowness_at(self.start_s + now_s),
            )
            runs.append(drive(world))
        return {name: statistics.median(run[name] for run in runs) for name in runs[0]}, world.engine.stats()


def serve(
    recipe: SchedulerRecipe, drive: Drive, tenants: Sequence[str] = (), model: str | Path = DEFAULT_MODEL
) -> ServedRun:
    """Drives a load on a server that schedules by this recipe; each tenant gets a key.

    Raises ReplayDifference where the server's log does not replay to the same schedule.
    """
    keys = {tenant: f"key-of-{tenant}" for tenant in tenants}
    with tempfile.TemporaryDirectory() as directory:
        log_path = Path(directory) / "decisions"
        with _running(_command(recipe, model, log_path), keys, Path(directory)) as url:
            world = ServedLoad(url, keys)
            figures = drive(world)
        data = log_path.read_bytes()
    served = SchedulerRecipe.from_values(DecisionLog(data).header)
    _check_recipe(recipe, served)
    machine = fit_to(recorded_steps(DecisionLog(data)))
    stats = replayed_stats(data)
    return ServedRun(figures, served, data, stats, machine, world.start_s, _turnaround_s(data, world))


def compare(
    benchmark: str, recipe: SchedulerRecipe, drive: Drive, figures: Sequence[str], tenants: Sequence[str] = ()
) -> int:
    """Drives a load on a server and in virtual time; the figures must be within 15 % of each other."""
    run = serve(recipe, drive, tenants)
    document = new_document(f"{benchmark}-real", {"recipe": run.recipe.to_values()})
    return tell(document, result_path(document), compared(run, drive, figures, document))


def compared(run: ServedRun, drive: Drive, figures: Sequence[str], document: dict[str, Any]) -> list[dict[str, Any]]:
    """Puts both sides into the document and prints them; the verdicts."""
    virtual, stats = run.repeat(drive)
    document["fitted"] = {"machine": asdict(run.machine), "start_s": run.start_s, "turnaround_s": run.turnaround_s}
    document["real"] = {**run.figures, **counters(run.stats)}
    document["virtual"] = {**virtual, **counters(stats)}
    print(f"{run.machine}\nturnaround {run.turnaround_s * 1e3:.1f} ms")
    for name, value in document["real"].items():
        print(f"{name:<24} real {value:>10.4g}   virtual {document['virtual'][name]:>10.4g}")
    return [
        verdict(
            f"{name}: virtual over real, less 1",
            abs(virtual[name] / run.figures[name] - 1),
            MOST_APART,
            is_at_most=True,
        )
        for name in figures
    ]


def counters(stats: EngineStats) -> dict[str, int]:
    """What a schedule is known by."""
    names = ("num_steps", "num_preemptions", "num_recomputed_tokens", "num_prompt_tokens", "num_generation_tokens")
    return {name: getattr(stats, name) for name in names}


def replayed_stats(log: bytes) -> EngineStats:
    """The counters of the scheduler that wrote a log. Raises ReplayDifference."""
    replay = Replay(DecisionLog(log))
    for _ in replay.run():
        pass
    assert replay.cut_at is None, "the server was stopped in an orderly way"
    return replay.stats()


@contextmanager
def _running(command: list[str], keys: Mapping[str, str], directory: Path) -> Iterator[str]:
    """A server until the block ends; its address."""
    port = free_port()
    command = [*command, "--port", str(port)]
    if keys:
        key_path = directory / "keys.json"
        key_path.write_text(json.dumps({key: {"tenant": tenant} for tenant, key in keys.items()}))
        command += ["--api-key-file", str(key_path)]
    with running_server(command, port, directory / "server.log", READY_TIMEOUT_S):
        yield f"http://127.0.0.1:{port}"


def _command(recipe: SchedulerRecipe, model: str | Path, log_path: Path) -> list[str]:
    command = [sys.executable, "-m", "ropeway", "serve", str(model), "--decision-log", str(log_path)]
    for name, flag in FLAGS.items():
        command += [flag, str(getattr(recipe, name))]
    for name, flag in TARGET_FLAGS.items():
        target_s = getattr(recipe, name)
        command += [] if target_s is None else [flag, str(target_s * 1e3)]
    return command


def _check_recipe(asked: SchedulerRecipe, served: SchedulerRecipe) -> None:
    """Costs are the server's own to measure, layers its model's; the rest is what the experiment says it is about."""
    asked_values, served_values = asked.to_values(), served.to_values()
    own = {name for name in served_values if name.startswith("step_") or name == "num_layers"}
    other = {n: v for n, v in served_values.items() if n not in own and v != asked_values[n]}
    if other:
        raise SystemExit(f"the server schedules by {other}, which the experiment did not ask for")


def _turnaround_s(log: bytes, world: ServedLoad) -> float:
    """Both clocks are the machine's monotonic one."""
    commits_s = [record.now_s for record in DecisionLog(log).records() if isinstance(record, CommitRecord)]
    ways_s = []
    for passage in world.passages:
        if passage.end_s is not None and passage.finish_reason in ("stop", "length"):
            end_s = world.start_s + passage.end_s
            ways_s.append(end_s - commits_s[bisect.bisect_right(commits_s, end_s) - 1])
    return 2 * statistics.median(ways_s)
