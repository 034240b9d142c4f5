"""The engine thread under a fake backend: failures, stalls, messages from other threads, one wake-up per step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.gated_engine import PROMPT, GatedBackend, engine_on, request, run_with_engine

from ropeway.core.stats import EngineStats
from ropeway.engine import engine_thread
from ropeway.engine.async_engine import AsyncEngine
from ropeway.engine.engine import Engine
from ropeway.engine.engine_thread import EngineThread, StepNews
from ropeway.errors import EngineStoppedError, RequestTooLargeError
from ropeway.model.gguf import GgufFile
from ropeway.outputs import Assembler, Delta
from ropeway.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(GgufFile.open(tiny_model_path).metadata)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_tokens_are_those_of_the_backend(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        deltas = await engine.submit([request("a"), request("b", 5, prompt=(80,))]).take_all()
        for request_id, prompt, num_tokens in (("a", PROMPT, 20), ("b", (80,), 5)):
            token_ids = [token for delta in deltas if delta.request_id == request_id for token in delta.token_ids]
            assert tuple(token_ids) == backend.expected_tokens(prompt, num_tokens)
        assert backend.thread_names == {"ropeway-engine"}

    run_with_engine(tokenizer, scenario)


def test_news_are_passed_on_step_by_step_and_in_order(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        backend.gate.clear()
        stream = engine.submit([request("a", n=3), request("b", 5, prompt=(80,))])
        taken: list[list[Delta]] = []
        reading = asyncio.create_task(stream.pass_on(taken.append))
        await asyncio.sleep(0)
        backend.gate.set()
        await reading
        assert stream.is_finished
        for index in range(3):
            token_ids = [
                t for step in taken for d in step for t in d.token_ids if (d.request_id, d.index) == ("a", index)
            ]
            assert tuple(token_ids) == backend.expected_tokens(PROMPT, 20)
        # Each call has what one step brought, whole: the first 5 steps, every sequence.
        assert [len(step) for step in taken[:5]] == [4] * 5

    run_with_engine(tokenizer, scenario)


def test_a_writer_that_fails_ends_its_own_reading_only(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        backend.gate.clear()
        broken, whole = engine.submit([request("a")]), engine.submit([request("b")])

        def write(deltas: list[Delta]) -> None:
            raise ValueError("no such socket")

        reading, other = asyncio.create_task(broken.pass_on(write)), asyncio.create_task(whole.take_all())
        await asyncio.sleep(0)
        backend.gate.set()
        with pytest.raises(ValueError, match="no such socket"):
            await reading
        broken.close()
        assert sum(len(delta.token_ids) for delta in await other) == 20

    run_with_engine(tokenizer, scenario)


def test_passing_on_ends_with_the_stream(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        backend.gate.clear()
        stream = engine.submit([request("a")])
        reading = asyncio.create_task(stream.pass_on(lambda deltas: None))
        await asyncio.sleep(0)
        stream.close()
        await reading
        assert not stream.is_finished
        backend.gate.set()
        refused = engine.submit([request("b", max_tokens=10_000)])
        with pytest.raises(RequestTooLargeError):
            await refused.pass_on(lambda deltas: None)

    run_with_engine(tokenizer, scenario)


def test_a_failed_step_ends_its_requests_and_health_is_red_until_one_succeeds(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        backend.failures.append(ValueError("broken"))
        deltas = await engine.submit([request("a")]).take_all()
        assert [delta.finish_reason for delta in deltas] == ["error"]
        await until(lambda: engine.stats.num_failed_steps == 1)
        with pytest.raises(EngineStoppedError, match="last step failed"):
            engine.check_health(30)
        assert (await engine.submit([request("b")]).take_all())[-1].finish_reason == "length"
        await until(lambda: engine.num_open_requests == 0)
        engine.check_health(30)
        assert engine.metrics.finished == {"error": 1, "length": 1}

    run_with_engine(tokenizer, scenario)


def test_a_broken_engine_answers_everybody_and_health_stays_red(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        backend.gate.clear()
        streams = [engine.submit([request(name, n=2)]) for name in "abc"]

        def step(self: Engine) -> None:
            raise RuntimeError("scheduler bug")

        monkeypatch.setattr(Engine, "step", step)
        backend.gate.set()
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="scheduler bug"):
                while await stream.take():
                    pass
        with pytest.raises(EngineStoppedError, match="scheduler bug"):
            engine.check_health(30)
        with pytest.raises(EngineStoppedError, match="scheduler bug"):
            engine.submit([request("d")])
        assert engine.metrics.finished["error"] == 6 and engine.num_open_requests == 0

    async def main() -> None:
        backend = GatedBackend()
        engine = AsyncEngine(engine_on(backend), tokenizer)
        engine.start()
        await asyncio.wait_for(scenario(engine, backend), 30)
        assert await engine.shutdown(0.0) is False

    asyncio.run(main())


def test_health_is_red_while_nothing_moves(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        await asyncio.sleep(0.05)
        engine.check_health(0.04)  # idle for long is not stalled
        backend.gate.clear()
        stream = engine.submit([request("a")])
        engine.check_health(0.04)
        await asyncio.sleep(0.06)
        with pytest.raises(EngineStoppedError, match="no step has completed"):
            engine.check_health(0.04)
        backend.gate.set()
        await stream.take_all()
        engine.check_health(30)

    run_with_engine(tokenizer, scenario)


def test_closing_frees_the_blocks_before_the_next_step(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        stream = engine.submit([request("a", 200, n=3)])
        await stream.take()
        backend.gate.clear()
        stream.close()
        assert await stream.take() == []
        num_forwards = backend.num_forwards
        backend.gate.set()
        await until(lambda: engine.num_open_requests == 0)
        assert engine.stats.num_used_blocks == 0
        assert backend.num_forwards <= num_forwards + 1  # the one that was under way
        assert engine.metrics.finished == {"abort": 3}

    run_with_engine(tokenizer, scenario)


def test_requests_the_engine_refuses_raise_in_their_stream_only(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        bad, good = engine.submit([request("bad", 5000)]), engine.submit([request("good")])
        with pytest.raises(RequestTooLargeError):
            await bad.take()
        assert (await good.take_all())[-1].finish_reason == "length"

    run_with_engine(tokenizer, scenario)


def test_text_that_cannot_be_put_together_ends_its_request_only(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        streams = {name: engine.submit([request(name)]) for name in ("bad", "good")}

        class Broken(Assembler):
            def push(self, event: object) -> Delta | None:
                raise KeyError("no such token")

        engine._open["bad"].assembler = Broken(request("bad"), tokenizer)
        with pytest.raises(EngineStoppedError, match="no such token"):
            await streams["bad"].take_all()
        assert (await streams["good"].take_all())[-1].finish_reason == "length"
        await until(lambda: engine.num_open_requests == 0)

    run_with_engine(tokenizer, scenario)
    assert "bad" in caplog.text


def test_a_reader_that_does_not_read_holds_up_nobody(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        slow, fast = engine.submit([request("slow", 150)]), engine.submit([request("fast", 150)])
        assert len([delta for delta in await fast.take_all() if delta.token_ids]) == 150
        await until(lambda: slow.is_finished)
        token_ids = [token for delta in await slow.take() for token in delta.token_ids]
        assert tuple(token_ids) == backend.expected_tokens(PROMPT, 150)
        assert await slow.take() == []

    run_with_engine(tokenizer, scenario)


def test_abort_from_another_thread(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        stream = engine.submit([request("a", 300)])
        await stream.take()
        await asyncio.to_thread(engine.abort, "a")
        assert (await stream.take_all())[-1].finish_reason == "abort"
        engine.abort("a")
        engine.abort("never heard of")

    run_with_engine(tokenizer, scenario)


def test_one_wake_up_per_step(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        num_wake_ups = 0
        deliver = engine._deliver

        def counting(news: object) -> None:
            nonlocal num_wake_ups
            num_wake_ups += 1
            deliver(news)  # type: ignore[arg-type]

        engine._deliver = counting  # type: ignore[method-assign]
        backend.gate.clear()
        stream = engine.submit([request(f"r{number}", 30) for number in range(8)])
        backend.gate.set()
        await stream.take_all()
        assert num_wake_ups <= backend.num_forwards + 1

    run_with_engine(tokenizer, scenario)


def test_metrics_follow_the_requests(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        await engine.submit([request("a", 7, n=2), request("b", 3)]).take_all()
        metrics = engine.metrics
        assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (6, 17)
        counts = [
            sum(histogram.counts)
            for histogram in (
                metrics.time_to_first_token_s,
                metrics.request_queue_time_s,
                metrics.e2e_request_latency_s,
                metrics.inter_token_latency_s,
            )
        ]
        assert counts == [2, 2, 3, 6 + 6 + 2]

    run_with_engine(tokenizer, scenario)


def test_submit_needs_a_running_engine(tokenizer: Tokenizer) -> None:
    engine = AsyncEngine(engine_on(GatedBackend()), tokenizer)
    with pytest.raises(EngineStoppedError, match="not been started"):
        engine.submit([request("a")])


def test_books_that_do_not_add_up_are_found_when_the_engine_falls_idle(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_on(GatedBackend())
    engine._scheduler._kv._pools[0].take(1)  # a block that nobody holds
    news: list[StepNews] = []
    thread = EngineThread(engine, news.append)
    thread.start()
    thread.submit(request("a", 3))
    assert thread.join(10)
    assert [e.finish_reason for n in news for e in n.events][-1] == "length", "the answer came first"
    assert isinstance(news[-1].failure, AssertionError) and "miscounted" in str(news[-1].failure)
    assert "the engine failed and has stopped" in caplog.text


@pytest.mark.parametrize(("interval_s", "is_each_step"), [(0.0, True), (1e9, False)])
def test_gauges_are_looked_up_where_somebody_came_or_ended_or_after_a_while(
    interval_s: float, is_each_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "STATS_INTERVAL_S", interval_s)
    engine = engine_on(GatedBackend())
    looked_at: list[int] = []
    stats = engine.stats

    def counted() -> EngineStats:
        looked_at.append(stats().num_steps)
        return stats()

    monkeypatch.setattr(engine, "stats", counted)
    news: list[StepNews] = []
    thread = EngineThread(engine, news.append)
    thread.submit(request("a"))
    thread.start()
    deadline_s = time.monotonic() + 10
    while not (news and news[-1].events and news[-1].events[-1].finish_reason):
        assert time.monotonic() < deadline_s, "no answer"
        time.sleep(0.001)
    thread.close()
    assert thread.join(10)
    assert thread.stats.num_running == 0 and thread.stats.num_generation_tokens == 20
    steps = [number for number in looked_at if 0 < number <= 20]
    assert set(steps) == (set(range(1, 21)) if is_each_step else {1, 20})
