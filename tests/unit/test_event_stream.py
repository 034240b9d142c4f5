"""A streamed answer over HTTP: whatever ends it, its stream is closed and its writer told of the end, once and last."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence

import pytest

from ropeway.engine.output_stream import OutputStream
from ropeway.errors import EngineStoppedError, RopewayError, SlowClientError
from ropeway.outputs import Delta
from ropeway.server.sse import EventStreamResponse, Message, StreamLimits

LIMITS = StreamLimits(ping_s=60, max_unread_bytes=100)
DISCONNECT: Message = {"type": "http.disconnect"}


class LoggingWriter:
    """Notes what it is asked for; a delta's text is its event, and `bug` a failure of its own."""

    ping = b""

    def __init__(self) -> None:
        self.log: list[str] = []

    def first(self) -> bytes:
        self.log.append("first")
        return b"first"

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        text = "".join(delta.text for delta in deltas)
        self.log.append(text)
        if text == "bug":
            raise ValueError("a bug")
        return text.encode()

    def last(self) -> bytes:
        self.log.append("last")
        return b"last"

    def failure(self, error: RopewayError) -> bytes:
        self.log.append("failure")
        return b"failure"

    def close(self) -> None:
        self.log.append("close")


class Client:
    """Who asked: what it got, and how it ends the stream. aborted: what the stream has given up, and why."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        aborted: list[tuple[str, RopewayError | None]] = []
        self.aborted = aborted
        self.stream = OutputStream(["r"], lambda request_id, cause: aborted.append((request_id, cause)))
        self.writer = LoggingWriter()
        self.leaving: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.is_broken = False

    async def receive(self) -> Message:
        return await self.leaving

    async def send(self, message: Message) -> None:
        if self.is_broken:
            raise OSError("the connection is gone")
        await self.has_room.wait()
        self.got.append(message.get("body", b""))

    def begin(self) -> asyncio.Task[None]:
        """Asks for the stream."""
        return asyncio.create_task(EventStreamResponse(self.stream, self.writer, LIMITS)({}, self.receive, self.send))

    def tell(self, text: str) -> None:
        """News of a step."""
        self.stream.put(Delta("r", 0, text, (1,), None))
        self.stream.flush()


async def turns() -> None:
    """Lets everybody go on until all wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def ends(client: Client) -> None:
    client.stream.put(Delta("r", 0, "b", (1,), "stop"))
    client.stream.finish("r")


async def leaves(client: Client) -> None:
    client.leaving.set_result(DISCONNECT)


async def leaves_as_it_ends(client: Client) -> None:
    client.stream.close()
    client.stream.finish("r")


async def is_cut_off_while_its_socket_is_full(client: Client) -> None:
    client.has_room.clear()
    client.tell("b")
    client.leaving.set_result({**DISCONNECT, "cause": SlowClientError("it does not read")})
    await turns()
    client.has_room.set()  # as a connection does that is lost


async def reads_too_slowly(client: Client) -> None:
    client.has_room.clear()
    client.tell("b")
    client.tell("c" * 200)
    await turns()
    client.has_room.set()


async def is_failed_by_the_engine(client: Client) -> None:
    client.stream.fail("r", EngineStoppedError("the engine failed"))


ORDERLY: dict[Callable[[Client], object], list[str]] = {
    ends: ["b", "last", "close"],
    leaves: ["close"],
    leaves_as_it_ends: ["last", "close"],
    is_cut_off_while_its_socket_is_full: ["b", "close"],
    reads_too_slowly: ["b", "c" * 200, "failure", "close"],
    is_failed_by_the_engine: ["failure", "close"],
}


@pytest.mark.parametrize("end", ORDERLY)
def test_the_writer_is_told_of_the_end_once_and_last(end: Callable[[Client], object]) -> None:
    async def main() -> None:
        client = Client()
        serving = client.begin()
        await turns()
        client.tell("a")
        await end(client)  # type: ignore[misc]
        await asyncio.wait_for(serving, 5)
        assert client.writer.log == ["first", "a", *ORDERLY[end]]
        was_over = end in (ends, is_failed_by_the_engine)
        assert [name for name, _ in client.aborted] == ([] if was_over else ["r"])

    asyncio.run(main())


def test_a_client_that_leaves_before_the_first_byte() -> None:
    async def main() -> None:
        client = Client()
        client.has_room.clear()
        serving = client.begin()
        await turns()
        await leaves(client)
        await turns()
        client.has_room.set()
        await asyncio.wait_for(serving, 5)
        assert client.writer.log[-1] == "close" and client.writer.log.count("close") == 1
        assert client.aborted == [("r", None)]

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["no head", "no body", "bug", "cancelled"])
def test_also_where_serving_it_fails(fault: str) -> None:
    errors = {"bug": ValueError, "cancelled": asyncio.CancelledError}

    async def main() -> None:
        client = Client()
        client.is_broken = fault == "no head"
        serving = client.begin()
        await turns()
        client.is_broken = True
        if fault == "cancelled":
            serving.cancel()
        elif fault != "no head":
            client.tell("bug" if fault == "bug" else "a")
        with pytest.raises(errors.get(fault, OSError)):
            await asyncio.wait_for(serving, 5)
        assert client.writer.log[-1] == "close" and client.writer.log.count("close") == 1
        assert client.aborted == [("r", None)]

    asyncio.run(main())


def test_nothing_keeps_what_was_streamed_to_a_client_that_has_left() -> None:
    async def main() -> None:
        client = Client()
        serving = client.begin()
        await turns()
        client.tell("a")
        await leaves(client)
        await serving
        kept = [weakref.ref(client.writer), weakref.ref(client.stream)]
        del client, serving
        await turns()
        assert [ref() for ref in kept] == [None, None]

    gc.disable()  # by their counts alone, not because somebody looked for circles
    try:
        asyncio.run(main())
    finally:
        gc.enable()
