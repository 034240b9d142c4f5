"""Scheduling invariance of the whole engine: the logits that every token was drawn from, and the tokens themselves, are
the same bits alone and in batches, chunked and whole, preempted and not, on one thread and two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.random_gguf import ODD_MODEL, RandomModel, requantize_gguf, write_random_gguf
from tests.support.recording_backend import Hashes, RecordingBackend

from ropeway import _native
from ropeway.backends.native import NativeBackend
from ropeway.core.admission import OptimisticAdmission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, SamplingParams
from ropeway.core.prefix_index import TokenHasher
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.engine.engine import Engine, EngineStats
from ropeway.engine.runner import Runner
from ropeway.model.loading import Model, load_model
from ropeway.model.weights import TensorType

MAX_MODEL_LEN = 640
AMPLE_BLOCKS = 400

Tokens = dict[tuple[str, int], list[int]]  # by request id and index


@dataclass(frozen=True, slots=True)
class Setting:
    """How requests are scheduled; what must not matter."""

    num_at_once: int = 64
    token_budget: int = 2048
    num_kv_blocks: int = AMPLE_BLOCKS
    num_threads: int = 2
    num_requests: int = 24
    has_prefix_cache: bool = False
    num_rounds: int = 1  # of the same requests, one round after the other


SETTINGS = {
    "batches-of-2": Setting(num_at_once=2),
    "batches-of-7": Setting(num_at_once=7, num_threads=1),
    "batches-of-64": Setting(num_requests=64),
    "one-thread": Setting(num_threads=1),
    "chunks-of-16": Setting(num_at_once=16, token_budget=16),
    "chunks-of-64": Setting(token_budget=64),
    "chunks-of-512": Setting(token_budget=512),
    "preempted": Setting(num_kv_blocks=41, num_requests=64),
    "preempted-in-chunks": Setting(token_budget=96, num_kv_blocks=37, num_threads=1),
    "cached": Setting(has_prefix_cache=True, num_rounds=2),
    "cached-in-chunks": Setting(token_budget=48, has_prefix_cache=True, num_rounds=2, num_threads=1),
    "cached-evicted": Setting(num_at_once=3, num_kv_blocks=47, has_prefix_cache=True, num_rounds=2),
    "cached-preempted": Setting(token_budget=96, num_kv_blocks=41, has_prefix_cache=True, num_rounds=2),
}


def make_requests(vocab_size: int, *, num_requests: int, max_prompt_tokens: int) -> list[Request]:
    """Ragged prompts, one of them long, and beginnings of it; greedy and seeded with every kind of filter and penalty;
    one with n = 3.
    """
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
        if i > 1 and i % 4 == 0:  # some of whole blocks, some with a tail of its own
            prompt = requests[1].prompt_token_ids[: 10 * i] + prompt[: i % 3]
        requests.append(Request(str(i), prompt, params, max_tokens=int(rng.integers(3, 11)), seed=1000 + i))
    return requests


@dataclass(frozen=True, slots=True)
class Served:
    """What came of requests. tokens: the same in each round."""

    tokens: Tokens
    hashes: Hashes
    stats: EngineStats
    num_blocks_copied: int


def serve(model: Model, requests: Sequence[Request], setting: Setting, isa: str | None) -> Served:
    """All requests through one engine, in rounds."""
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
    kv = KVManager([setting.num_kv_blocks], 16, TokenHasher(16) if setting.has_prefix_cache else None)
    scheduler = Scheduler(limits, kv, batching=ContinuousBatching(OptimisticAdmission()))
    runner = Runner(backend, max_num_seqs=setting.num_at_once, max_model_len=MAX_MODEL_LEN)
    engine = Engine(scheduler, runner, lambda: 0.0)
    rounds = [_run_all(engine, requests) for _ in range(setting.num_rounds)]
    assert all(tokens == rounds[0] for tokens in rounds)
    scheduler.check_invariants()
    assert not backend.conflicts, "drawn from two sets of logits"
    return Served(rounds[0], backend.hashes, engine.stats(), backend.num_blocks_copied)


def _run_all(engine: Engine, requests: Sequence[Request]) -> Tokens:
    for request in requests:
        engine.submit(request)
    tokens: Tokens = {}
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
            assert event.finish_reason in (None, "length")
    return tokens


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
    served = serve(model, requests, Setting(num_at_once=1, num_threads=1), isa)
    return Case(model, isa, requests, (served.tokens, served.hashes))


CASES = (
    "default-avx512", "odd-avx512", "default-avx2", "q8_0-avx2", "odd-avx2", "q8_0-scalar", "odd-scalar",
)  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
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
    requests = case.requests[: setting.num_requests]
    served = serve(case.model, requests, setting, case.isa)
    names, seeds = {request.request_id for request in requests}, {request.seed for request in requests}
    tokens, hashes = case.alone
    assert served.tokens == {key: value for key, value in tokens.items() if key[0] in names}
    assert served.hashes == {key: value for key, value in hashes.items() if key[0] in seeds}
    if len(case.requests) == 64:
        assert (served.stats.num_preemptions > 0) == ("preempted" in name)
        assert (served.stats.num_evicted_blocks > 0) == ("cached" in name and setting.num_kv_blocks < AMPLE_BLOCKS)
    if setting.has_prefix_cache:
        assert served.stats.num_prefix_hits > 500 and served.num_blocks_copied > 0


def test_one_of_four_sequences_is_the_one_alone(case: Case) -> None:
    """n = 4 shares the prompt and copies its last block; each of the four draws as if it had computed it."""
    prompt = case.requests[1].prompt_token_ids
    tokens, hashes = {}, {}
    for has_cache in (False, True):
        setting = Setting(has_prefix_cache=has_cache)
        for n in (1, 4):
            params = SamplingParams(temperature=0.9, n=n, max_tokens=6)
            requests = [Request(str(size), prompt[:size], params, 6, 7 * size) for size in (3, 33, 48, 63)]
            served = serve(case.model, requests, setting, case.isa)
            assert (served.num_blocks_copied > 0) == (n > 1 and has_cache)
            for key, token_ids in served.tokens.items():
                assert tokens.setdefault(key, token_ids) == token_ids
            for place, digest in served.hashes.items():
                assert hashes.setdefault(place, digest) == digest
    assert len({tuple(tokens["48", index]) for index in range(4)}) > 1


def test_the_default_model_stored_as_q8_0(model_path: Path, tmp_path: Path) -> None:
    path = requantize_gguf(model_path, tmp_path / "q8_0.gguf", TensorType.Q8_0)
    case = make_case(path, _native.supported_isas()[0], 8, 70)
    served = serve(case.model, case.requests, Setting(token_budget=64), case.isa)
    assert (served.tokens, served.hashes) == case.alone
