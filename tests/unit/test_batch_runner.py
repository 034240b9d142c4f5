"""The line runner with answers of our own: retries, full disks, time limits, turns of tenants, cancelling, restarts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ropeway.batch.directory import BatchDirectory
from ropeway.batch.journal import Journal
from ropeway.batch.journal_thread import JournalThread
from ropeway.batch.lines import LineLimits
from ropeway.batch.records import BatchRecord, FileRecord, LineAnswer
from ropeway.server import batch_runner
from ropeway.server.batch_answers import TryAgainError
from ropeway.server.batch_runner import MAX_ATTEMPTS, BatchRunner, RunnerTerms

URL = "/v1/completions"


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "TICK_S", 0.02)


class Bench:
    """A directory with a journal, a runner on it, and a clock that tests move."""

    def __init__(self, path: Path, answer: Callable[[str, int], Awaitable[LineAnswer]], **terms: Any) -> None:
        self.now_s = 0.0
        self.directory = BatchDirectory(path)
        self.directory.open()
        self.journal = JournalThread(Journal(self.directory.journal_path))

        async def answer_line(record: BatchRecord, data: bytes, seed: int) -> LineAnswer:
            return await answer(json.loads(data)["custom_id"], seed)

        values = {"max_in_flight": 4, "models": ("m",), "limits": LineLimits(1000, 1000), **terms}
        self.runner = BatchRunner(
            self.directory, self.journal, answer_line, RunnerTerms(clock=lambda: self.now_s, **values)
        )

    async def __aenter__(self) -> Bench:
        await self.runner.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.runner.close()
        self.journal.close()
        self.directory.close()

    async def begin(self, batch_id: str, num_lines: int, tenant: str = "", model: str = "m") -> None:
        """A batch whose lines are called by its id and their number."""
        lines = [
            json.dumps({"custom_id": f"{batch_id}{number}", "method": "POST", "url": URL, "body": {}})
            for number in range(num_lines)
        ]
        self.directory.file_path(f"in-{batch_id}").write_text("\n".join(lines))
        record = BatchRecord(
            batch_id=batch_id,
            tenant=tenant,
            input_file_id=f"in-{batch_id}",
            endpoint=URL,
            model=model,
            metadata="null",
            status="validating",
            created_s=0,
            expires_s=100,
            output_lifetime_s=50,
        )
        file = FileRecord(
            file_id=f"in-{batch_id}", tenant=tenant, filename="", purpose="batch", num_bytes=1, created_s=0, expires_s=9
        )

        def add(journal: Journal) -> BatchRecord:
            journal.add_file(file)
            return journal.add_batch(record)

        self.runner.add(await self.journal.run(add))

    async def record(self, batch_id: str) -> BatchRecord:
        found = await self.journal.run(lambda journal: journal.batch(batch_id))
        assert found is not None
        return found

    async def until(self, batch_id: str, condition: Callable[[BatchRecord], bool]) -> BatchRecord:
        async with asyncio.timeout(20):
            while not condition(await self.record(batch_id)):
                await asyncio.sleep(0.01)
        return await self.record(batch_id)

    def results(self, file_id: str | None) -> dict[str, Any]:
        """By custom id, in order."""
        if file_id is None:
            return {}
        lines = map(json.loads, self.directory.file_path(file_id).read_text().splitlines())
        return {line["custom_id"]: line["error"] or line["response"]["body"] for line in lines}


def right(text: str, status_code: int = 200) -> LineAnswer:
    return LineAnswer(status_code=status_code, request_id="r", body=json.dumps(text).encode())


async def at_once(custom_id: str, seed: int) -> LineAnswer:
    await asyncio.sleep(0)
    return right(custom_id)


async def never(custom_id: str, seed: int) -> LineAnswer:
    await asyncio.Event().wait()
    raise AssertionError


def has_ended(record: BatchRecord) -> bool:
    return not record.is_open


def test_more_lines_than_are_read_at_once_are_answered_in_order(tmp_path: Path) -> None:
    num_now, most = 0, 0

    are_four_here = asyncio.Event()

    async def answer(custom_id: str, seed: int) -> LineAnswer:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        if num_now == 4:
            are_four_here.set()
        await asyncio.wait_for(are_four_here.wait(), 60)
        await asyncio.sleep(0.0001 * (int(custom_id[1:]) % 3))
        num_now -= 1
        return right(custom_id)

    async def main() -> None:
        async with Bench(tmp_path, answer) as bench:
            await bench.begin("b", 600)
            done = await bench.until("b", has_ended)
            assert list(bench.results(done.output_file_id)) == [f"b{number}" for number in range(600)]
            assert (done.status, done.num_completed, most) == ("completed", 600, 4)

    asyncio.run(main())


def test_a_line_whose_steps_fail_is_tried_again_and_given_up_in_the_end(tmp_path: Path) -> None:
    tries: Counter[str] = Counter()

    async def answer(custom_id: str, seed: int) -> LineAnswer:
        tries[custom_id] += 1
        if custom_id == "b0" or (custom_id == "b1" and tries[custom_id] < MAX_ATTEMPTS):
            raise TryAgainError("a step failed", has_run=True)
        if custom_id == "b2" and tries[custom_id] < 3 * MAX_ATTEMPTS:
            raise TryAgainError("the queue is full", has_run=False)
        if custom_id == "b3":
            raise RuntimeError("a bug of ours")
        return right(custom_id)

    async def main() -> None:
        async with Bench(tmp_path, answer) as bench:
            await bench.begin("b", 5)
            done = await bench.until("b", has_ended)
            assert list(bench.results(done.output_file_id)) == ["b1", "b2", "b4"]
            errors = bench.results(done.error_file_id)
            assert errors.keys() == {"b0", "b3"} and errors["b3"]["error"]["code"] == "internal_error"
        assert tries["b0"] == MAX_ATTEMPTS and tries["b2"] == 3 * MAX_ATTEMPTS

    asyncio.run(main())


def test_an_answer_waits_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_answer, num_failures = Journal.put_answer, 5

    def put(journal: Journal, batch: int, number: int, answer: LineAnswer) -> None:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            raise sqlite3.OperationalError("database or disk is full")
        put_answer(journal, batch, number, answer)

    monkeypatch.setattr(Journal, "put_answer", put)
    tries: Counter[str] = Counter()

    async def answer(custom_id: str, seed: int) -> LineAnswer:
        tries[custom_id] += 1
        return right(custom_id)

    async def main() -> None:
        async with Bench(tmp_path, answer) as bench:
            await bench.begin("b", 8)
            assert (await bench.until("b", has_ended)).num_completed == 8
        assert set(tries.values()) == {1} and not num_failures

    asyncio.run(main())


def test_what_is_not_answered_in_time_expires(tmp_path: Path) -> None:
    async def answer(custom_id: str, seed: int) -> LineAnswer:
        return right("soon") if custom_id == "b0" else await never(custom_id, seed)

    async def main() -> None:
        async with Bench(tmp_path, answer) as bench:
            await bench.begin("b", 9)
            await bench.begin("other", 2, model="another")
            await bench.until("b", lambda record: record.num_completed == 1)
            bench.now_s = 100.0
            done = await bench.until("b", has_ended)
            assert done.status == "expired" and done.expired_s == 100
            assert bench.results(done.output_file_id) == {"b0": "soon"}
            errors = bench.results(done.error_file_id)
            assert len(errors) == 8 and {error["code"] for error in errors.values()} == {"batch_expired"}
            assert (await bench.until("other", has_ended)).status == "expired"

    asyncio.run(main())


def test_a_batch_whose_time_is_up_at_a_start_expires(tmp_path: Path) -> None:
    """With more lines left than may be in flight: lines are taken, and cancelled before they have begun."""

    async def answer(custom_id: str, seed: int) -> LineAnswer:
        return right("soon") if custom_id in ("a0", "b0") else await never(custom_id, seed)

    async def main() -> None:
        async with Bench(tmp_path, answer) as bench:
            await bench.begin("a", 11)
            await bench.until("a", lambda record: record.num_completed == 1)
        bench = Bench(tmp_path, answer)
        bench.now_s = 100.0
        async with bench:
            done = await bench.until("a", has_ended)
            assert done.status == "expired" and bench.results(done.output_file_id) == {"a0": "soon"}
            bench.now_s = 50.0
            await bench.begin("b", 1)  # the places of the lines are free again
            assert (await bench.until("b", has_ended)).status == "completed"

    asyncio.run(main())


def test_tenants_take_turns(tmp_path: Path) -> None:
    running: list[str] = []

    async def answer(custom_id: str, seed: int) -> LineAnswer:
        running.append(custom_id[0])
        return await never(custom_id, seed)

    async def main() -> None:
        async with Bench(tmp_path, answer, max_in_flight=6) as bench:
            await bench.runner.close()  # it starts again with all of them
            for batch_id, tenant in (("a", "large"), ("b", "large"), ("c", "small")):
                await bench.begin(batch_id, 20, tenant)
            await asyncio.sleep(0.1)
        async with Bench(tmp_path, answer, max_in_flight=6):
            async with asyncio.timeout(20):
                while len(running) < 6:
                    await asyncio.sleep(0.01)
        assert sorted(running) == ["a", "a", "a", "c", "c", "c"]

    asyncio.run(main())


def test_a_cancelled_batch_ends_though_the_server_was_killed_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        async with Bench(tmp_path, never) as bench:
            await bench.begin("b", 3)
            await bench.until("b", lambda record: record.status == "in_progress")
            await bench.journal.run(lambda journal: journal.set_status("b", "cancelling", 5))
        async with Bench(tmp_path, never) as bench:
            done = await bench.until("b", has_ended)
            assert done.status == "cancelled" and len(bench.results(done.error_file_id)) == 3

    asyncio.run(main())


@pytest.mark.parametrize("step", ["begin", "put_answer", "set_status", "end"])
def test_cut_off_at_any_step_it_goes_on_with_the_same_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    seeds: dict[str, set[int]] = {}

    async def answer(custom_id: str, seed: int) -> LineAnswer:
        seeds.setdefault(custom_id, set()).add(seed)
        return right(custom_id)

    def cut(*args: object, **kwargs: object) -> None:
        raise sqlite3.OperationalError("cut off")

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Journal, step, cut)
            async with Bench(tmp_path, answer) as bench:
                await bench.begin("b", 6)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await asyncio.Event().wait()
        async with Bench(tmp_path, answer) as bench:
            done = await bench.until("b", has_ended)
            assert done.num_completed == 6 and len(bench.results(done.output_file_id)) == 6
        assert len(seeds) == 6 and all(len(each) == 1 for each in seeds.values())

    asyncio.run(main())
