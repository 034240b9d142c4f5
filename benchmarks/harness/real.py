"""One point of an experiment on the real engine, and again in virtual time on a machine fitted to that very run.

The engine, its runner and its backend are real, and so is the time; only where an answer ends is scripted, by putting a
stop token in the place of what was drawn. Knows no experiment.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.results import new_document, result_path
from harness.virtual import prior_of, tell, verdict
from ropeway.catalog import DEFAULT_MODEL, resolve_model
from ropeway.config import EngineConfig, free_memory_bytes, resolve
from ropeway.core.params import Request
from ropeway.core.plan import StepPlan, StepResult
from ropeway.core.recipe import SchedulerRecipe
from ropeway.core.stats import EngineStats
from ropeway.engine.decision_log_file import DecisionLogFile
from ropeway.engine.decision_recorder import DecisionRecorder, RecordingHasher
from ropeway.engine.engine import Engine
from ropeway.engine.runner import Runner
from ropeway.llm import make_backend, model_facts
from ropeway.model.loading import load_model
from ropeway.sim.cost_model import CostModel, StepShape
from ropeway.sim.simulator import AnswerLengths, Arrival, Lengths, Simulation, make_arrival, simulate

MOST_APART = 0.15
MAX_LOG_BYTES = 1 << 30


class WallClock:
    """The time of the wall, in seconds from the start of the experiment. waited_s: of it, with nothing to do."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self.waited_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() - self._start_s

    def wait_until(self, time_s: float) -> None:
        now_s = self()
        time.sleep(max(0.0, time_s - now_s))
        self.waited_s += self() - now_s


class ScriptedEnds:
    """A real runner whose answers end where they were scripted to.

    Keeps the shape of every step and its time, which is that from its launch to the next one's, less what was waited:
    so it holds planning, committing and the harness, as the time of a virtual step does.
    """

    def __init__(self, runner: Runner, lengths: AnswerLengths, clock: WallClock) -> None:
        self._runner = runner
        self._lengths = lengths
        self._clock = clock
        self._token_ids: tuple[int, ...] = ()
        self._shapes: list[StepShape] = []
        self._begun_s: list[float] = []  # without the time waited

    def add(self, sequence_id: int, request: Request, index: int) -> None:
        self._lengths.begin(sequence_id, request)
        self._runner.add(sequence_id, request, index)

    def launch(self, plan: StepPlan) -> None:
        self._token_ids = self._lengths.token_ids(plan)
        self._begun_s.append(self._clock() - self._clock.waited_s)
        self._shapes.append(StepShape.of(plan))
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        assert not result.failed_sequence_ids, "a row had no token to draw"
        return replace(result, token_ids=self._token_ids)

    def fit(self) -> CostModel:
        """What a step costs here."""
        times_s = [after - before for before, after in itertools.pairwise(self._begun_s)]
        return CostModel.fit(self._shapes[:-1], times_s)


class RealMachine:
    """The default model on this machine."""

    def __init__(self) -> None:
        path = resolve_model(DEFAULT_MODEL)
        self._model = load_model(path)
        self._name = path.stem

    def compare(
        self,
        benchmark: str,
        make_recipe: Callable[[dict[str, float]], SchedulerRecipe],
        drive: Callable[[Simulation], dict[str, Any]],
        figures: Sequence[str],
    ) -> int:
        """Drives a load on the real engine and in virtual time; the figures must be within 15 % of each other.

        make_recipe: the scheduler, given what is known of the machine at the start.
        """
        recipe = make_recipe(self._calibrate(make_recipe({})))
        simulation, runner = self._simulation(recipe)
        real = drive(simulation)
        _check(simulation)
        cost = runner.fit()
        virtual = drive(simulate(recipe.make(), cost))
        document = new_document(f"{benchmark}-real", {"recipe": recipe.to_values(), "fitted": repr(cost)})
        document |= {"real": real, "virtual": virtual}
        verdicts = [
            verdict(
                f"{name}: virtual over real, less 1", abs(virtual[name] / real[name] - 1), MOST_APART, is_at_most=True
            )
            for name in figures
        ]
        for name in real:
            print(f"{name:<24} real {real[name]:>10.4g}   virtual {virtual[name]:>10.4g}")
        return tell(document, result_path(document), verdicts)

    def record(
        self,
        log_path: Path,
        make_recipe: Callable[[dict[str, float]], SchedulerRecipe],
        arrivals: Sequence[Arrival],
        on_step: Callable[[Simulation], None],
    ) -> EngineStats:
        """Serves arrivals on the real engine and writes the decision log of it; the engine's counters at the end."""
        recipe = make_recipe(self._calibrate(make_recipe({})))
        log = DecisionLogFile(log_path, recipe.to_values(), MAX_LOG_BYTES)
        simulation, _ = self._simulation(recipe, DecisionRecorder(log.put, os.urandom(32)))
        simulation.run(arrivals, on_step=on_step)
        log.close()
        _check(simulation)
        return simulation.engine.stats()

    def _calibrate(self, recipe: SchedulerRecipe) -> dict[str, float]:
        """What a step costs on this machine, from a short load of prompts of all lengths and up to 12 decodes."""
        simulation, runner = self._simulation(recipe)
        lengths = [Lengths(16 * 2 ** (number % 6), 8 + number * 5 % 48, 64) for number in range(36)]
        simulation.run([make_arrival(number, 0.1 * number, each) for number, each in enumerate(lengths)])
        _check(simulation)
        return prior_of(runner.fit())

    def _simulation(
        self, recipe: SchedulerRecipe, recorder: DecisionRecorder | None = None
    ) -> tuple[Simulation, ScriptedEnds]:
        config = EngineConfig(
            max_model_len=recipe.max_model_len,
            max_num_seqs=recipe.max_num_seqs,
            max_num_batched_tokens=recipe.max_num_batched_tokens,
            num_kv_blocks=recipe.num_kv_blocks,
        )
        facts = resolve(config, model_facts(self._name, self._model, config), free_memory_bytes())
        backend = make_backend(self._model, facts)
        lengths, clock = AnswerLengths(), WallClock()
        runner = ScriptedEnds(
            Runner(backend, max_num_seqs=recipe.max_num_seqs, max_model_len=recipe.max_model_len), lengths, clock
        )
        hasher = None if recorder is None else RecordingHasher(recipe.block_size, recorder.note_hash)
        return Simulation(Engine(recipe.make(hasher), runner, clock, recorder), lengths, clock), runner


def _check(simulation: Simulation) -> None:
    if num_failed := simulation.engine.stats().num_failed_steps:
        raise SystemExit(f"{num_failed} steps could not be computed: these figures would mean nothing")
