"""The book of requests: charges, retention, and names, on a clock of the test's own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.gated_engine import GatedBackend, request, run_with_engine

from ropeway.engine.async_engine import AsyncEngine
from ropeway.model.gguf import GgufFile
from ropeway.server.errors import UnknownRequestError
from ropeway.server.request_book import MAX_ENDED, RETENTION_S, RequestBook
from ropeway.server.tenants import Caller, KeyTerms
from ropeway.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(GgufFile.open(tiny_model_path).metadata)


class CountingCaller(Caller):
    def __init__(self, tenant: str = "a") -> None:
        super().__init__(KeyTerms(tenant=tenant))
        self.charges: list[int] = []

    def charge(self, num_tokens: int) -> None:
        self.charges.append(num_tokens)


def test_prompts_are_charged_at_once_answers_at_their_end(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        book, caller = RequestBook(engine), CountingCaller()
        backend.gate.clear()
        stream = book.submit("answer", [request("r", max_tokens=7)], caller, "mine")
        assert caller.charges == [3]
        backend.gate.set()
        await stream.take_all()
        await asyncio.sleep(0)
        assert caller.charges == [3, 7]
        status = await book.status("answer", caller)
        assert status.state == "finished" and status.num_generated_tokens == 7

    run_with_engine(tokenizer, scenario)


def test_what_never_started_costs_nothing(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        book, caller = RequestBook(engine), CountingCaller()
        engine.pause()
        stream = book.submit("answer", [request("r")], caller, "mine")
        await stream.wait_accepted()
        assert (await book.status("mine", caller)).waiting_reason == "paused"
        assert book.abort(["mine"], caller) == ["answer"]
        await stream.take_all()
        while (await book.status("mine", caller)).state != "aborted":
            await asyncio.sleep(0.01)
        assert sum(caller.charges) == 0 and engine.stats.num_steps == 0

    run_with_engine(tokenizer, scenario)


def test_requests_are_forgotten_in_time_and_beyond_a_number(tokenizer: Tokenizer) -> None:
    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        now_s = 0.0
        book, caller = RequestBook(engine, lambda: now_s), CountingCaller()

        async def ask(number: int, client_id: str) -> None:
            await book.submit(f"answer-{number}", [request(f"r{number}", max_tokens=1)], caller, client_id).take_all()
            while (await book.status(f"answer-{number}", caller)).state != "finished":
                await asyncio.sleep(0)

        await ask(0, "same")
        now_s = 1.0
        await ask(1, "same")
        assert (await book.status("same", caller)).answer_id == "answer-1"
        now_s = RETENTION_S + 0.5
        with pytest.raises(UnknownRequestError):
            await book.status("answer-0", caller)
        assert (await book.status("same", caller)).answer_id == "answer-1"
        with pytest.raises(UnknownRequestError):
            await book.status("same", CountingCaller("b"))
        now_s = 2 * RETENTION_S
        for name in ("answer-1", "same"):
            with pytest.raises(UnknownRequestError):
                await book.status(name, caller)
        assert not (book._by_id or book._by_client_id or book._ended or book._record_of)

    assert MAX_ENDED > 2
    run_with_engine(tokenizer, scenario)


def test_the_oldest_goes_where_there_are_too_many(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropeway.server.request_book.MAX_ENDED", 2)

    async def scenario(engine: AsyncEngine, backend: GatedBackend) -> None:
        book, caller = RequestBook(engine), CountingCaller()
        for number in range(4):
            requests = [request(f"r{number}", max_tokens=1)]
            await book.submit(f"answer-{number}", requests, caller, f"c{number}").take_all()
            while (await book.status(f"answer-{number}", caller)).state != "finished":
                await asyncio.sleep(0)
        assert list(book._by_id) == ["answer-2", "answer-3"]

    run_with_engine(tokenizer, scenario)
