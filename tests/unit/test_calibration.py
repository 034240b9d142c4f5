"""The calibrated token budget, on a clock that only forward passes move."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from tests.support.random_gguf import RandomModel, write_random_gguf

from ropeway.backends.batch import Float32Array, ForwardBatch, SampleBatch, Samples
from ropeway.calibration import MAX_TOKEN_BUDGET, MIN_TOKEN_BUDGET, calibrate_token_budget
from ropeway.config import EngineConfig, ModelFacts, resolve
from ropeway.model.loading import load_model
from ropeway.model.program import Program

MODEL_FACTS = ModelFacts(name="m", context_length=8192, kv_bytes_per_token=1, weights_bytes=1)
FACTS = resolve(EngineConfig(num_kv_blocks=1024), MODEL_FACTS, 8 << 30)


class ScriptedBackend:
    """Takes seconds(T) for a pass of T tokens, times the next of `disturbances` (then 1)."""

    vocab_size, num_kv_blocks, block_size = 320, 1024, 16

    def __init__(self, seconds: Callable[[int], float], disturbances: Iterable[float] = ()) -> None:
        self._seconds = seconds
        self._disturbances = iter(disturbances)
        self.now_s = 0.0
        self.sizes: list[int] = []

    def forward(self, batch: ForwardBatch) -> Float32Array:
        assert len(batch.tables[0].block_ids) * self.block_size >= batch.kv_lens[0] == len(batch.token_ids)
        self.sizes.append(len(batch.token_ids))
        self.now_s += self._seconds(len(batch.token_ids)) * next(self._disturbances, 1.0)
        return np.zeros((len(batch.out_rows), self.vocab_size), np.float32)

    def sample(self, logits: Float32Array, batch: SampleBatch) -> Samples:
        raise AssertionError("calibration does not sample")

    def budget(self, program: Program) -> int:
        return calibrate_token_budget(self, program, FACTS, clock=lambda: self.now_s)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    model = load_model(write_random_gguf(tmp_path_factory.mktemp("model") / "m.gguf", RandomModel()))
    return replace(model.program, context_length=8192)


@pytest.mark.parametrize(
    ("fixed_ms", "token_ms", "expected"),
    [(10, 1, 80), (3, 0.5, 192), (2, 0.1, 976), (0, 0.001, MAX_TOKEN_BUDGET)],
)
def test_budget_fills_100_ms(program: Program, fixed_ms: float, token_ms: float, expected: int) -> None:
    backend = ScriptedBackend(lambda num_tokens: (fixed_ms + token_ms * num_tokens) / 1000)
    budget = backend.budget(program)
    assert budget == expected
    assert fixed_ms + token_ms * budget <= 100 + 1e-9
    assert budget % 16 == 0


def test_disturbed_passes_do_not_count(program: Program) -> None:
    def seconds(num_tokens: int) -> float:
        return 0.002 + 0.0005 * num_tokens

    quiet = ScriptedBackend(seconds).budget(program)
    for first in range(4):
        spikes = [3.0 if number % 4 == first else 1.0 for number in range(40)]
        # The very first pass may be slow; after it at most one pass of each size, so its other passes tell the truth.
        disturbed = ScriptedBackend(seconds, spikes).budget(program)
        assert quiet / 2 <= disturbed <= quiet
    assert ScriptedBackend(seconds, [5.0, 1.0, 1.0, 2.0, 1.0]).budget(program) == quiet


def test_a_step_slower_than_a_line_stays_within_the_promise(program: Program) -> None:
    backend = ScriptedBackend(lambda num_tokens: 0.0004 * num_tokens + 2e-6 * num_tokens**2)
    budget = backend.budget(program)
    assert 0.0004 * budget + 2e-6 * budget**2 <= 0.13  # extrapolated over a factor of 2 at most


def test_slow_machine_gets_the_floor_and_a_warning(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    backend = ScriptedBackend(lambda num_tokens: 0.01 * num_tokens)
    with caplog.at_level(logging.WARNING):
        assert backend.budget(program) == MIN_TOKEN_BUDGET
    assert "max_num_batched_tokens" in caplog.text
    assert len(backend.sizes) <= 4


def test_calibration_is_short(program: Program) -> None:
    backend = ScriptedBackend(lambda num_tokens: 0.005 + 0.001 * num_tokens)
    backend.budget(program)
    assert backend.now_s < 0.4
