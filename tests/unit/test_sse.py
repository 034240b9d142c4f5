"""Sending without a task switch: a coroutine begun by hand ends as an awaited one would; what waits is in order."""

from __future__ import annotations

import asyncio
import json

import orjson
import pytest

from ropeway.server.sse import Begun, Message, Outbox, begin


async def send(log: list[str], *waits: asyncio.Future[str]) -> None:
    log.append("begun")
    for wait in waits:
        log.append(await wait)
    log.append("sent")


def test_what_does_not_wait_is_done_at_once() -> None:
    log: list[str] = []
    assert begin(send(log)) is None
    assert log == ["begun", "sent"]


def test_what_waits_is_awaited_to_its_end() -> None:
    async def main() -> None:
        loop, log = asyncio.get_running_loop(), []
        first, second = loop.create_future(), loop.create_future()
        rest = begin(send(log, first, second))
        assert rest is not None and log == ["begun"]
        loop.call_later(0.001, first.set_result, "room")
        loop.call_later(0.002, second.set_result, "more room")
        await rest
        assert log == ["begun", "room", "more room", "sent"]

    asyncio.run(main())


def test_what_it_returns_comes_out_whether_it_waited_or_not() -> None:
    async def answer(wait: asyncio.Future[int] | None) -> int:
        return 1 if wait is None else await wait

    async def main() -> None:
        at_once = Begun(answer(None))
        assert at_once.is_done and await at_once == 1
        wait = asyncio.get_running_loop().create_future()
        later = Begun(answer(wait))
        assert not later.is_done
        wait.set_result(2)
        assert await later == 2

    asyncio.run(main())


def test_errors_come_out_where_they_would() -> None:
    async def fail(wait: asyncio.Future[str] | None) -> None:
        if wait is not None:
            await wait
        raise ValueError("gone")

    async def main() -> None:
        with pytest.raises(ValueError, match="gone"):
            begin(fail(None))
        wait = asyncio.get_running_loop().create_future()
        rest = begin(fail(wait))
        assert rest is not None
        wait.set_result("go on")
        with pytest.raises(ValueError, match="gone"):
            await rest

    asyncio.run(main())


def test_cancelling_reaches_the_coroutine() -> None:
    async def main() -> None:
        log: list[str] = []

        async def patient(wait: asyncio.Future[str]) -> None:
            try:
                await wait
            finally:
                log.append("let go")

        rest = begin(patient(asyncio.get_running_loop().create_future()))
        assert rest is not None

        async def read() -> None:
            await rest

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert log == ["let go"]

    asyncio.run(main())


def test_an_outbox_gathers_while_the_socket_is_full_and_keeps_the_order() -> None:
    async def main() -> None:
        has_room = asyncio.Event()
        has_room.set()
        taken: list[bytes] = []

        async def send(message: Message) -> None:
            await has_room.wait()
            taken.append(message["body"])

        async with Outbox(send) as outbox:
            outbox.put(b"at once")
            assert taken == [b"at once"] and outbox.num_bytes == 0
            has_room.clear()
            for chunk in (b"one", b"", b"two", b"three"):
                outbox.put(chunk)
            await asyncio.sleep(0)
            assert len(taken) == 1 and outbox.num_bytes == 11
            has_room.set()
            await outbox.sent()
            assert taken == [b"at once", b"one", b"twothree"] and outbox.num_bytes == 0
            outbox.put(b"again")
            assert taken[-1] == b"again"

    asyncio.run(main())


def test_an_event_is_one_line_for_every_reader() -> None:
    """Readers of events split them with str.splitlines, which knows more line ends than the newline."""
    text = "\u2028 \u2029 \x85 \x1c \x0b \r \n ä €"
    sent: list[bytes] = []

    async def take(message: Message) -> None:
        sent.append(message["body"])

    async def main() -> None:
        async with Outbox(take) as outbox:
            outbox.put(b"data: " + orjson.dumps({"text": text}) + b"\n\n")

    asyncio.run(main())
    data, blank = b"".join(sent).decode().splitlines()
    assert json.loads(data.removeprefix("data: ")) == {"text": text} and not blank
