"""The costs of a step as timed at load, on a clock that only forward passes move."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from tests.support.random_gguf import RandomModel, write_random_gguf

from ropeway.backends.batch import Float32Array, ForwardBatch, SampleBatch, Samples
from ropeway.calibration import READ_PAIRS, calibrate_step_costs
from ropeway.config import EngineConfig, EngineFacts, ModelFacts, resolve
from ropeway.core.step_time import KNEE_TOKENS, StepCosts, StepWork, num_pairs
from ropeway.model.loading import load_model
from ropeway.model.program import Program

MODEL_FACTS = ModelFacts(name="m", context_length=8192, kv_bytes_per_token=1, weights_bytes=1)
FACTS = resolve(EngineConfig(num_kv_blocks=1024), MODEL_FACTS, 8 << 30)


class ScriptedBackend:
    """Takes what `costs` say for a pass, times the next of `disturbances` (then 1)."""

    vocab_size, num_kv_blocks, block_size = 320, 1024, 16

    def __init__(self, costs: StepCosts, disturbances: Iterable[float] = ()) -> None:
        self._costs = costs
        self._disturbances = iter(disturbances)
        self.now_s = 0.0
        self.works: list[StepWork] = []

    def forward(self, batch: ForwardBatch) -> Float32Array:
        counts = np.diff(batch.query_indptr)
        starts = batch.kv_lens - counts
        table = batch.tables[0]
        ends = [*table.offsets[1:], len(table.block_ids)]
        for first, end, kv_len in zip(table.offsets, ends, batch.kv_lens, strict=True):
            assert (end - first) * self.block_size >= kv_len and max(table.block_ids[first:end]) < self.num_kv_blocks
        pairs = sum(num_pairs(int(start), int(count)) for start, count in zip(starts, counts, strict=True))
        work = StepWork(len(batch.token_ids), pairs, len(batch.out_rows), int(batch.kv_lens.sum()))
        self.works.append(work)
        self.now_s += self._costs.seconds(work) * next(self._disturbances, 1.0)
        return np.zeros((len(batch.out_rows), self.vocab_size), np.float32)

    def sample(self, logits: Float32Array, batch: SampleBatch) -> Samples:
        raise AssertionError("calibration does not sample")

    def calibrate(self, program: Program, facts: EngineFacts = FACTS) -> StepCosts:
        return calibrate_step_costs(self, program, facts, clock=lambda: self.now_s)


TWO_CORES = StepCosts(6e-3, 9e-4, 9e-4, 7e-7, 6e-4, 7e-7 * READ_PAIRS)
FAST = StepCosts(1e-3, 2e-5, 5e-5, 2e-9, 1e-5, 2e-9 * READ_PAIRS)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    model = load_model(write_random_gguf(tmp_path_factory.mktemp("model") / "m.gguf", RandomModel()))
    return replace(model.program, context_length=8192)


def as_tuple(costs: StepCosts) -> tuple[float, ...]:
    return costs.fixed_s, costs.token_s, costs.later_token_s, costs.pair_s, costs.row_s


def test_every_cost_is_found(program: Program) -> None:
    assert as_tuple(ScriptedBackend(TWO_CORES).calibrate(program)) == pytest.approx(as_tuple(TWO_CORES), rel=1e-3)
    backend = ScriptedBackend(FAST)
    costs = backend.calibrate(program)
    assert max(work.num_tokens for work in backend.works) > KNEE_TOKENS
    for work in (StepWork(1, 100, 1), StepWork(200, 20_000, 4), StepWork(900, 400_000, 1)):
        assert costs.seconds(work) == pytest.approx(FAST.seconds(work), rel=0.02)


def test_disturbed_passes_do_not_count(program: Program) -> None:
    for first in range(4):
        spikes = [3.0 if number % 4 == first else 1.0 for number in range(60)]
        costs = ScriptedBackend(TWO_CORES, [5.0, *spikes]).calibrate(program)
        assert costs.seconds(StepWork(64, 2080, 1)) == pytest.approx(TWO_CORES.seconds(StepWork(64, 2080, 1)), rel=0.3)


def test_a_tiny_pool_is_not_exceeded(program: Program) -> None:
    facts = resolve(EngineConfig(num_kv_blocks=1), MODEL_FACTS, 8 << 30)
    backend = ScriptedBackend(TWO_CORES)
    backend.num_kv_blocks = 1
    costs = backend.calibrate(program, facts)
    assert costs.seconds(StepWork(8, 36, 1)) == pytest.approx(TWO_CORES.seconds(StepWork(8, 36, 1)), rel=0.2)


def test_a_slow_machine_is_told_of(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    backend = ScriptedBackend(StepCosts(0.0, 0.03, 0.03, 0.0, 0.0))
    with caplog.at_level(logging.WARNING):
        backend.calibrate(program)
    assert "busy or slow" in caplog.text


def test_calibration_is_short(program: Program) -> None:
    backend = ScriptedBackend(TWO_CORES)
    backend.calibrate(program)
    assert backend.now_s < 0.7
