"""The engine with the real runner on a backend that checks every block table, and what it does when a step fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import pytest

from ropeway.backends.batch import Float32Array, ForwardBatch
from ropeway.core.admission import OptimisticAdmission
from ropeway.core.batching import Batching, ContinuousBatching, StaticBatching
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, SamplingParams
from ropeway.core.plan import SequenceEvent
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.engine.engine import Engine
from ropeway.engine.runner import Runner
from ropeway.errors import InvalidRequestError, RequestTooLargeError
from support.fake_backend import FakeBackend

MAX_MODEL_LEN = 48


class FailingBackend(FakeBackend):
    """Raises in the forward passes it is told to, counted from 0."""

    def __init__(self, *, failing: Iterable[int] = (), **options: Any) -> None:
        super().__init__(**options)
        self.failing = set(failing)
        self.num_calls = 0

    def forward(self, batch: ForwardBatch) -> Float32Array:
        self.num_calls += 1
        if self.num_calls - 1 in self.failing:
            raise RuntimeError("the backend broke")
        return super().forward(batch)


def make_engine(backend: FakeBackend, *, budget: int = 16, batching: Batching | None = None) -> Engine:
    limits = SchedulerLimits(4, budget, MAX_MODEL_LEN)
    scheduler = Scheduler(limits, KVManager([backend.num_kv_blocks], backend.block_size), batching=batching)
    return Engine(scheduler, Runner(backend, max_num_seqs=4, max_model_len=MAX_MODEL_LEN), time.monotonic)


def make_request(number: int, *, stop_token_ids: frozenset[int] = frozenset(), **params: Any) -> Request:
    """Prompts of 1 to 17 tokens, answers of 3 to 24."""
    prompt = tuple((number * 7 + i * i) % 64 for i in range(1 + number * 5 % 17))
    max_tokens = 3 + number * 8 % 22
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
    return Request(f"r{number}", prompt, sampling, max_tokens, 0, stop_token_ids)


def run(engine: Engine) -> dict[tuple[str, int], tuple[tuple[int, ...], str]]:
    """Run to the end: the tokens and the finish reason of each sequence."""
    return collect([event for _ in iter(lambda: engine.has_work, False) for event in engine.step()])


def collect(events: Iterable[SequenceEvent]) -> dict[tuple[str, int], tuple[tuple[int, ...], str]]:
    tokens: dict[tuple[str, int], tuple[int, ...]] = {}
    reasons: dict[tuple[str, int], str] = {}
    for event in events:
        name = (event.request_id, event.index)
        assert name not in reasons, "an event after the terminal one"
        tokens[name] = tokens.get(name, ()) + event.token_ids
        if event.finish_reason:
            reasons[name] = event.finish_reason
    assert tokens.keys() == reasons.keys()
    return {name: (tokens[name], reasons[name]) for name in tokens}


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("num_blocks", [7, 11, 60])
@pytest.mark.parametrize(
    "batching",
    [
        ContinuousBatching(),
        ContinuousBatching(OptimisticAdmission(2)),
        StaticBatching(),
        StaticBatching(is_padded=True),
    ],
    ids=["continuous", "watermark", "static", "padded"],
)
def test_tokens_are_those_of_each_request_alone(batching: Batching, num_blocks: int, budget: int) -> None:
    backend = FakeBackend(num_kv_blocks=num_blocks, block_size=6)
    engine = make_engine(backend, budget=budget, batching=batching)
    expected = {}
    for number in range(12):
        request = make_request(number, n=1 + number % 2, stop_token_ids=frozenset({number}))
        engine.submit(request)
        tokens = backend.expected_tokens(request.prompt_token_ids, request.max_tokens)
        reason = "length"
        if number in tokens:
            tokens, reason = tokens[: tokens.index(number) + 1], "stop"
        expected |= {(request.request_id, i): (tokens, reason) for i in range(request.params.n)}
    assert run(engine) == expected
    assert {reason for _, reason in expected.values()} == {"length", "stop"}
    stats = engine.stats()
    assert stats.num_free_blocks == num_blocks and stats.num_running == stats.num_waiting == 0
    if num_blocks == 7 and isinstance(batching, ContinuousBatching):
        assert stats.num_preemptions > 0 and stats.num_recomputed_tokens > 0


def test_requests_come_and_go_between_steps() -> None:
    backend = FakeBackend(num_kv_blocks=9, block_size=6)
    engine = make_engine(backend, budget=5)
    events: list[SequenceEvent] = []
    for number in range(20):
        engine.submit(make_request(number, n=2))
        events += engine.step()
        if number % 3 == 2:
            events += engine.abort(f"r{number - 1}")
        if number % 4 == 3:
            events += engine.stop(f"r{number - 2}", 1)
    while engine.has_work:
        events += engine.step()
    answers = collect(events)
    assert len(answers) == 40 and {reason for _, reason in answers.values()} == {"length", "abort", "stop"}
    for (request_id, _), (tokens, _) in answers.items():
        request = make_request(int(request_id[1:]))
        assert tokens == backend.expected_tokens(request.prompt_token_ids, request.max_tokens)[: len(tokens)]
    assert engine.stats().num_free_blocks == 9


def test_idle() -> None:
    engine = make_engine(FakeBackend(num_kv_blocks=9, block_size=6))
    assert not engine.has_work and engine.step() == [] and engine.max_model_len == MAX_MODEL_LEN
    assert engine.abort("unknown") == [] and engine.stop("unknown", 0) == []


def test_what_is_refused_leaves_nothing_behind() -> None:
    engine = make_engine(FakeBackend(num_kv_blocks=9, block_size=4))
    assert engine.max_model_len == 36
    large = Request("large", (1,) * 30, SamplingParams(max_tokens=7), 7, 0)
    with pytest.raises(RequestTooLargeError):
        engine.submit(large)
    with pytest.raises(InvalidRequestError):
        engine.submit(Request("empty", (), SamplingParams(), 16, 0))
    assert not engine.has_work


def test_a_runner_that_will_not_take_a_request_leaves_it_unsubmitted() -> None:
    class FullRunner(Runner):
        def add(self, sequence_id: int, request: Request, index: int) -> None:
            if sequence_id == 1:
                raise MemoryError("no room")
            super().add(sequence_id, request, index)

    backend = FakeBackend(num_kv_blocks=9, block_size=4)
    scheduler = Scheduler(SchedulerLimits(4, 16, 36), KVManager([9], 4))
    engine = Engine(scheduler, FullRunner(backend, max_num_seqs=4, max_model_len=36), time.monotonic)
    with pytest.raises(MemoryError):
        engine.submit(make_request(1, n=2))
    assert not engine.has_work
    engine.submit(make_request(1))  # its id is free again
    assert run(engine)["r1", 0][1] == "length"


@pytest.mark.parametrize("batching", [ContinuousBatching(), StaticBatching(is_padded=True)])
def test_a_failed_step_loses_no_request(batching: Batching, caplog: pytest.LogCaptureFixture) -> None:
    backend = FailingBackend(num_kv_blocks=8, block_size=6, failing={0, 5, 6, 20})
    engine = make_engine(backend, batching=batching)
    for number in range(16):
        engine.submit(make_request(number))
    with caplog.at_level(logging.ERROR):
        answers = run(engine)
    assert len(answers) == 16 and {reason for _, reason in answers.values()} == {"length", "error"}
    for (request_id, _), (tokens, reason) in answers.items():
        request = make_request(int(request_id[1:]))
        expected = backend.expected_tokens(request.prompt_token_ids, request.max_tokens)
        assert tokens == expected if reason == "length" else tokens == expected[: len(tokens)]
    assert engine.stats().num_failed_steps == 4 and engine.stats().num_free_blocks == 8
    failures = [record for record in caplog.records if record.exc_info]
    assert len(failures) == 4 and "the backend broke" in caplog.text


def test_a_step_is_not_swallowed_when_it_is_interrupted() -> None:
    class Interrupted(FakeBackend):
        def forward(self, batch: ForwardBatch) -> Float32Array:
            raise KeyboardInterrupt

    engine = make_engine(Interrupted(num_kv_blocks=8, block_size=6))
    engine.submit(make_request(1))
    with pytest.raises(KeyboardInterrupt):
        engine.step()


def test_requests_that_started() -> None:
    engine = make_engine(FakeBackend(num_kv_blocks=40, block_size=6), batching=StaticBatching())
    for number in range(6):
        engine.submit(make_request(number))
    engine.step()
    assert engine.take_started_ids() == ["r0", "r1", "r2", "r3"] and engine.take_started_ids() == []
