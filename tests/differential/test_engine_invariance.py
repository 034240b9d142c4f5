"""Scheduling invariance of the whole engine: the logits that every token was drawn from, and the tokens themselves, are
the same bits alone and in batches, chunked and whole, preempted and not, on one thread and two."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.random_gguf import ODD_MODEL, RandomModel, requantize_gguf, write_random_gguf

from ropeway import _native
from ropeway.backends.batch import Float32Array, ForwardBatch, SampleBatch, Samples
from ropeway.backends.native import NativeBackend
from ropeway.core.admission import OptimisticAdmission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, SamplingParams
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.engine.engine import Engine
from ropeway.engine.runner import Runner
from ropeway.model.loading import Model, load_model
from ropeway.model.weights import TensorType

MAX_MODEL_LEN = 640
AMPLE_BLOCKS = 400

# Per request: its tokens, and the hash of the logits that each was drawn from, by (seed, index, position).
Tokens = dict[tuple[str, int], list[int]]
Hashes = dict[tuple[int, int, int], bytes]


class RecordingBackend:
    """A native backend that hashes each row of logits before it is sampled. Requests are told apart by their seeds."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        self.hashes: Hashes = {}
        self.vocab_size, self.num_kv_blocks = backend.vocab_size, backend.num_kv_blocks
        self.block_size = backend.block_size

    def forward(self, batch: ForwardBatch) -> Float32Array:
        return self._backend.forward(batch)

    def sample(self, logits: Float32Array, batch: SampleBatch) -> Samples:
        for row in range(len(batch.seed)):
            key = (int(batch.seed[row]), int(batch.index[row]), int(batch.position[row]))
            digest = hashlib.sha256(np.ascontiguousarray(logits[row])).digest()
            assert self.hashes.setdefault(key, digest) == digest, f"{key} was drawn from two sets of logits"
        return self._backend.sample(logits, batch)


@dataclass(frozen=True, slots=True)
class Setting:
    """How requests are scheduled; what must not matter."""

    num_at_once: int = 64
    token_budget: int = 2048
    num_kv_blocks: int = AMPLE_BLOCKS
    num_threads: int = 2


SETTINGS = {
    "batches-of-2": Setting(num_at_once=2),
    "batches-of-7": Setting(num_at_once=7, num_threads=1),
    "batches-of-64": Setting(),
    "one-thread": Setting(num_threads=1),
    "chunks-of-16": Setting(num_at_once=16, token_budget=16),
    "chunks-of-64": Setting(token_budget=64),
    "chunks-of-512": Setting(token_budget=512),
    "preempted": Setting(num_kv_blocks=44),
    "preempted-in-chunks": Setting(token_budget=96, num_kv_blocks=37, num_threads=1),
}


def make_requests(vocab_size: int, *, num_requests: int, max_prompt_tokens: int) -> list[Request]:
    """Ragged prompts, one of them long; greedy and seeded with every kind of filter and penalty; one with n = 3."""
    rng = np.random.default_rng(11)
    requests = []
    for i in range(num_requests):
        num_prompt_tokens = max_prompt_tokens if i == 1 else int(rng.integers(1, 40))
        params = SamplingParams(temperature=0.0, max_tokens=10)
        if i % 2:
            params = SamplingParams(
                temperature=0.9, top_p=0.9, top_k=50, repetition_penalty=1.1, max_tokens=10, n=3 if i == 5 else 1
            )
        prompt = tuple(rng.integers(0, vocab_size, num_prompt_tokens).tolist())
        requests.append(Request(str(i), prompt, params, max_tokens=int(rng.integers(3, 11)), seed=1000 + i))
    return requests


def serve(model: Model, requests: Sequence[Request], setting: Setting, isa: str | None) -> tuple[Tokens, Hashes, int]:
    """All requests through one engine: their tokens, the hashes of their logits, the number of preemptions."""
    backend = RecordingBackend(
        NativeBackend(
            model.program,
            model.tensors,
            num_kv_blocks=setting.num_kv_blocks,
            num_threads=setting.num_threads,
            isa=isa,
        )
    )
    limits = SchedulerLimits(setting.num_at_once, setting.token_budget, MAX_MODEL_LEN)
    scheduler = Scheduler(
        limits, KVManager([setting.num_kv_blocks], 16), batching=ContinuousBatching(OptimisticAdmission())
    )
    engine = Engine(
        scheduler, Runner(backend, max_num_seqs=setting.num_at_once, max_model_len=MAX_MODEL_LEN), time.monotonic
    )
    for request in requests:
        engine.submit(request)
    tokens: Tokens = {}
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
            assert event.finish_reason in (None, "length")
    return tokens, backend.hashes, engine.stats().num_preemptions


@dataclass(frozen=True, slots=True)
class Case:
    model: Model
    isa: str
    requests: list[Request]
    alone: tuple[Tokens, Hashes]


def make_case(path: Path, isa: str, num_requests: int, max_prompt_tokens: int) -> Case:
    model = load_model(path)
    requests = make_requests(model.program.vocab_size, num_requests=num_requests, max_prompt_tokens=max_prompt_tokens)
    # One request at a time: nothing shares a step with it (n = 3 runs one sequence after the other).
    tokens, hashes, _ = serve(model, requests, Setting(num_at_once=1, num_threads=1), isa)
    return Case(model, isa, requests, (tokens, hashes))


@pytest.fixture(scope="module", params=["default-avx2", "q8_0-avx2", "odd-avx2", "q8_0-scalar", "odd-scalar"])
def case(request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, isa = request.param.rsplit("-", 1)
    if isa not in _native.supported_isas():
        pytest.skip(f"this processor has no {isa}")
    if name == "default":
        return make_case(model_path, isa, 64, 530)
    shape = ODD_MODEL if name == "odd" else RandomModel(weight_type=TensorType.Q8_0, num_heads=6, vocab_size=331)
    path = tmp_path_factory.mktemp(name) / "model.gguf"
    if isa == "scalar":  # the same kernels, some 50 times slower
        return make_case(write_random_gguf(path, replace(shape, num_layers=1)), isa, 20, 120)
    return make_case(write_random_gguf(path, shape), isa, 64, 530)


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_and_tokens_do_not_depend_on_scheduling(case: Case, name: str) -> None:
    setting = SETTINGS[name]
    tokens, hashes, num_preemptions = serve(case.model, case.requests, setting, case.isa)
    expected_tokens, expected_hashes = case.alone
    assert tokens == expected_tokens
    assert hashes == expected_hashes
    if "preempted" in name and len(case.requests) == 64:
        assert num_preemptions > 0


def test_the_default_model_stored_as_q8_0(model_path: Path, tmp_path: Path) -> None:
    path = requantize_gguf(model_path, tmp_path / "q8_0.gguf", TensorType.Q8_0)
    case = make_case(path, "avx2" if "avx2" in _native.supported_isas() else "scalar", 8, 70)
    tokens, hashes, _ = serve(case.model, case.requests, Setting(token_budget=64), case.isa)
    assert (tokens, hashes) == case.alone
