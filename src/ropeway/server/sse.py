"""Answers over HTTP: server-sent events while they grow, and the watch for clients that leave. Knows no JSON.

The text of a step leaves within the event loop's one wake-up for that step: a streamed token costs one bytes
concatenation and one `send`, no task switch and no framework objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, MutableMapping, Sequence
from typing import Any, Protocol

from starlette.responses import Response

from ropeway.engine.output_stream import OutputStream
from ropeway.errors import RopewayError
from ropeway.outputs import Delta

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@contextlib.asynccontextmanager
async def closed_on_disconnect(receive: Receive, stream: OutputStream) -> AsyncIterator[None]:
    """While inside, closes the stream as soon as the client is gone; closes it in any case at the end."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        stream.close()


class EventWriter(Protocol):
    """Turns deltas into the bytes of whole events."""

    @property
    def ping(self) -> bytes:
        """What says nothing, to a client whose answer has not begun."""
        ...

    def first(self) -> bytes:
        """What precedes every delta; may be empty."""
        ...

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events of some deltas; may be empty. Raises RopewayError where the answer cannot go on."""
        ...

    def last(self) -> bytes:
        """What follows every delta of an answer that ended."""
        ...

    def failure(self, error: RopewayError) -> bytes:
        """What ends an answer that cannot go on."""
        ...


class EventStreamResponse(Response):
    """Sends events as the stream's news come; the client's leaving closes `stream`.

    ping_s: until the first news it sends a ping so often, in seconds.
    """

    def __init__(self, stream: OutputStream, writer: EventWriter, *, ping_s: float) -> None:
        self.status_code = 200
        self.background = None
        self._stream = stream
        self._writer = writer
        self._ping_s = ping_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        stream, writer = self._stream, self._writer
        pinging: asyncio.Task[None] | None = None

        async def ping() -> None:
            while True:
                await asyncio.sleep(self._ping_s)
                await send(_body(writer.ping))

        def write(deltas: list[Delta]) -> Awaitable[None] | None:
            nonlocal pinging
            if pinging is not None:
                pinging.cancel()
                pinging = None
            chunk = writer.chunks(deltas)
            return begin(send(_body(chunk))) if chunk else None

        async with closed_on_disconnect(receive, stream):
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            try:
                first = writer.first()
                if first:
                    await send(_body(first))
                pinging = asyncio.create_task(ping())
                await stream.pass_on(write)
                if stream.is_finished:  # otherwise it was closed: the client has left
                    await send(_body(writer.last()))
            except RopewayError as error:
                await send(_body(writer.failure(error)))
            finally:
                if pinging is not None:
                    pinging.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


def begin(call: Awaitable[None]) -> Awaitable[None] | None:
    """Runs a coroutine as far as it goes without waiting: None where that was to its end, or else the rest to await.

    A `send` waits only while the client's socket is full, and a task switch for each of the others costs more than
    they do.
    """
    steps = call.__await__()
    try:
        waited_for = next(steps)
    except StopIteration:
        return None
    return _Rest(steps, waited_for)


class _Rest:
    """The rest of a coroutine that has begun and waits for a future."""

    def __init__(self, steps: Generator[Any, Any, None], waited_for: Any) -> None:
        self._steps = steps
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, None]:
        while True:
            try:
                answer = yield self._waited_for
            except BaseException as error:
                step = functools.partial(self._steps.throw, error)
            else:
                step = functools.partial(self._steps.send, answer)
            try:
                self._waited_for = step()
            except StopIteration:
                return
