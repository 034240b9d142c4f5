"""What is refused at the door, what runs out of time, and how both are told; stalls are logged."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from tests.support.gated_engine import GatedBackend, request, run_with_engine

from ropeway.core.admission import ReserveAdmission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.kv_manager import KVManager
from ropeway.core.limits import QueueLimits, SchedulerLimits
from ropeway.core.params import ServiceTerms
from ropeway.core.scheduler import Scheduler
from ropeway.engine.async_engine import AsyncEngine
from ropeway.errors import ConfigError, OverloadedError, RequestTimeoutError
from ropeway.model.gguf import GgufFile
from ropeway.server.health_watch import HealthWatch
from ropeway.text.tokenizer import Tokenizer
from support.scheduling import make_request, make_scheduler, run_step

TOKENS_PER_PROMPT = 4


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(GgufFile.open(tiny_model_path).metadata)


def crowded(queue: QueueLimits, *, max_num_seqs: int = 2) -> Scheduler:
    """A scheduler whose places are taken."""
    scheduler = Scheduler(SchedulerLimits(max_num_seqs, 64, 1000, queue), KVManager([64], 4))
    for number in range(max_num_seqs):
        scheduler.add(make_request(f"running-{number}", TOKENS_PER_PROMPT, 100, stop=False), 0.0)
    run_step(scheduler)
    return scheduler


@pytest.mark.parametrize("name", ["max_num_reqs", "max_num_tokens"])
def test_a_queue_limit_is_at_least_one(name: str) -> None:
    QueueLimits(**{name: 1})
    with pytest.raises(ConfigError, match="must be at least 1, not 0"):
        QueueLimits(**{name: 0})


def test_requests_beyond_the_limit_are_refused_with_the_numbers_and_leave_no_trace() -> None:
    scheduler = crowded(QueueLimits(max_num_reqs=2))
    for name in ("a", "b"):
        scheduler.add(make_request(name, TOKENS_PER_PROMPT, 1), 0.0)
    with pytest.raises(OverloadedError, match="2 requests wait .max_num_queued_reqs is 2"):
        scheduler.add(make_request("c", TOKENS_PER_PROMPT, 1), 0.0)
    scheduler.check_invariants()
    scheduler.abort("a")
    scheduler.add(make_request("c", TOKENS_PER_PROMPT, 1), 0.0)


def test_those_a_free_place_waits_for_do_not_count() -> None:
    scheduler = Scheduler(SchedulerLimits(8, 64, 1000, QueueLimits(max_num_reqs=1)), KVManager([64], 4))
    for number in range(9):
        scheduler.add(make_request(str(number), TOKENS_PER_PROMPT, 1), 0.0)
    with pytest.raises(OverloadedError, match="9 requests wait"):
        scheduler.add(make_request("9", TOKENS_PER_PROMPT, 1), 0.0)


def test_a_place_that_memory_keeps_from_those_who_wait_is_not_free() -> None:
    limits = SchedulerLimits(128, 64, 1000, QueueLimits(max_num_reqs=2))
    scheduler = Scheduler(limits, KVManager([8], 4), batching=ContinuousBatching(ReserveAdmission()))
    for name in ("fills", "the pool", "waits"):
        scheduler.add(make_request(name, 12, 4), 0.0)
    run_step(scheduler)
    scheduler.add(make_request("waits, too", 12, 4), 0.0)
    with pytest.raises(OverloadedError, match="2 requests wait"):
        scheduler.add(make_request("is refused", 12, 4), 0.0)
    scheduler.abort("fills")
    scheduler.add(make_request("comes in its place", 12, 4), 0.0)
    with pytest.raises(OverloadedError, match="3 requests wait"):
        scheduler.add(make_request("is refused", 12, 4), 0.0)


def test_tokens_that_wait_are_bounded_but_not_what_one_prompt_may_have() -> None:
    scheduler = crowded(QueueLimits(max_num_tokens=10))
    scheduler.add(make_request("long", 60, 1), 0.0)
    with pytest.raises(OverloadedError, match="60 tokens wait, and 1 more would exceed the 10"):
        scheduler.add(make_request("short", 1, 1), 0.0)
    scheduler.abort("long")
    scheduler.add(make_request("twice", 5, 1, n=2), 0.0)
    run_step(scheduler)  # both join the line
    with pytest.raises(OverloadedError, match="10 tokens wait"):
        scheduler.add(make_request("short", 1, 1), 0.0)


def test_background_requests_are_in_nobodys_way_at_the_door_and_are_never_refused() -> None:
    background = ServiceTerms(is_background=True)
    scheduler = Scheduler(SchedulerLimits(2, 64, 1000, QueueLimits(1, 12)), KVManager([64], 4))
    for number in range(6):
        scheduler.add(make_request(f"batch-{number}", 8, 100, stop=False, terms=background), 0.0)
    run_step(scheduler)
    for name in ("a", "b", "c"):  # two in the places of those that make way, and one that waits
        scheduler.add(make_request(name, TOKENS_PER_PROMPT, 1), 0.0)
    with pytest.raises(OverloadedError, match="3 requests wait"):
        scheduler.add(make_request("d", TOKENS_PER_PROMPT, 1), 0.0)
    scheduler.add(make_request("batch-6", 8, 100, stop=False, terms=background), 0.0)
    scheduler.check_invariants()
    for number in range(7):
        scheduler.abort(f"batch-{number}")
        scheduler.check_invariants()


def test_out_of_time_ends_what_runs_and_what_waits_and_frees_the_blocks() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("runs", 8, 50, stop=False, terms=ServiceTerms(timeout_s=10, queue_timeout_s=5)), 0.0)
    scheduler.add(make_request("waits", 8, 50, n=2, terms=ServiceTerms(queue_timeout_s=5)), 1.0)
    run_step(scheduler)
    assert scheduler.expire(5.9) == []
    expired = scheduler.expire(6.0)
    assert [(e.request_id, e.index, e.finish_reason, e.timeout) for e in expired] == [
        ("waits", 0, "error", "queue"),
        ("waits", 1, "error", "queue"),
    ]
    assert [(e.request_id, e.timeout) for e in scheduler.expire(10.0)] == [("runs", "request")]
    stats = scheduler.stats()
    assert not scheduler.has_work and stats.num_used_blocks == 0 and stats.num_timeouts == 3
    scheduler.check_invariants()


def test_why_the_first_in_line_waits_is_told() -> None:
    scheduler = crowded(QueueLimits())
    assert scheduler.stats().waiting_reason is None
    scheduler.add(make_request("next", TOKENS_PER_PROMPT, 1), 0.0)
    run_step(scheduler)
    assert scheduler.stats().waiting_reason == "capacity"


def test_the_door_counts_what_the_engine_has_not_seen_yet(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        engine.check_queue()
        running = engine.submit([request("running", 50)])
        await running.wait_accepted()
        backend.gate.clear()  # the engine thread reads no message now
        places = engine.stats.num_places
        waiting = [engine.submit([request(str(i))]) for i in range(places + 1)]
        with pytest.raises(OverloadedError, match="the queue is full"):
            engine.check_queue()
        late = engine.submit([request("late")])
        backend.gate.set()
        with pytest.raises(OverloadedError):
            await late.wait_accepted()
        for stream in waiting:
            await stream.wait_accepted()
            await stream.take_all()
        running.close()
        engine.check_queue()
        assert engine._num_unstarted == engine._num_unstarted_tokens == 0

    run_with_engine(tokenizer, scenario, max_num_queued_reqs=1)


def test_limits_of_time_reach_the_reader_as_errors_with_their_numbers(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        backend.gate.clear()
        slow = engine.submit([request("slow", 300, terms=ServiceTerms(timeout_s=0.02))])
        behind = engine.submit([request("behind", 20, n=8)])
        queued = engine.submit([request("queued", 1, terms=ServiceTerms(queue_timeout_s=0.02))])
        await asyncio.sleep(0.05)
        backend.gate.set()
        with pytest.raises(RequestTimeoutError, match=r"timeout is 0.02 s.*tokens generated"):
            await slow.take_all()
        with pytest.raises(OverloadedError, match=r"queue_timeout is 0.02 s"):
            await queued.take_all()
        assert len({delta.index for delta in await behind.take_all()}) == 8
        assert engine.num_open_requests == 0

    run_with_engine(tokenizer, scenario)


def test_a_stall_is_logged_once_and_so_is_its_end(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        watching = asyncio.create_task(HealthWatch(engine, 0.04).run())
        backend.gate.clear()
        stream = engine.submit([request("a")])
        await asyncio.sleep(0.2)
        backend.gate.set()
        await stream.take_all()
        await asyncio.sleep(0.05)
        watching.cancel()

    with caplog.at_level(logging.WARNING, "ropeway.server.health_watch"):
        run_with_engine(tokenizer, scenario)
    red, green = [record.message for record in caplog.records]
    assert red.startswith("/health is red: no step has completed") and green == "/health is green again"
