"""Answers over HTTP: server-sent events while they grow, and the watch for clients that leave. Knows no JSON.

The text of a step leaves within the event loop's one wake-up for that step: a streamed token costs one bytes
concatenation and one `send`, no task switch and no framework objects. While a client's socket is full its events are
gathered, up to a bound in bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response

from ropeway.engine.output_stream import OutputStream
from ropeway.errors import RopewayError, SlowClientError
from ropeway.line_ends import escaped_line_ends
from ropeway.outputs import Delta

logger = logging.getLogger(__name__)

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
        while (message := await receive())["type"] != "http.disconnect":
            pass
        stream.close(message.get("cause"))

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

    def close(self) -> None:
        """Nobody reads on: told once and last, whoever ended the stream, and how."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """ping_s: until its first news a stream gets a ping so often, in seconds. max_unread_bytes: what is gathered for a
    client that does not read; more end its stream.
    """

    ping_s: float
    max_unread_bytes: int


class EventStreamResponse(Response):
    """Sends events as the stream's news come; the client's leaving closes `stream`, and the end of all the writer."""

    def __init__(self, stream: OutputStream, writer: EventWriter, limits: StreamLimits) -> None:
        self.status_code = 200
        self.background = None
        self._stream = stream
        self._writer = writer
        self._limits = limits

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            await self._serve(receive, send)
        finally:
            self._writer.close()

    async def _serve(self, receive: Receive, send: Send) -> None:
        stream, writer = self._stream, self._writer
        async with closed_on_disconnect(receive, stream), Outbox(send) as outbox:
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            try:
                outbox.put(writer.first())
                too_slow = await self._pass_on(outbox)
                if too_slow is not None:
                    outbox.put(writer.failure(too_slow))
                elif stream.is_finished:  # otherwise it was closed: the client has left
                    outbox.put(writer.last())
            except RopewayError as error:
                outbox.put(writer.failure(error))
            await outbox.sent()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(self, outbox: Outbox) -> SlowClientError | None:
        """All of the answer, or what was wrong where too much of it stayed unread."""
        stream, writer, limits = self._stream, self._writer, self._limits
        pinger = Pinger(outbox, writer.ping, limits.ping_s)
        too_slow: SlowClientError | None = None

        def write(deltas: list[Delta]) -> None:
            nonlocal too_slow
            pinger.stop()
            outbox.put(writer.chunks(deltas))
            if outbox.num_bytes > limits.max_unread_bytes:
                too_slow = SlowClientError(
                    f"the client has left {outbox.num_bytes} bytes of its stream unread, and at most "
                    f"{limits.max_unread_bytes} are kept for it: the rest of the answer was aborted; read faster, or "
                    "ask for less"
                )
                stream.close(too_slow)

        try:
            await stream.pass_on(write)
        finally:
            pinger.stop()
        if too_slow is not None:
            logger.warning("%s", too_slow)
        return too_slow


class Pinger:
    """Puts a ping into an outbox every period_s from now on, until it is stopped; none where others wait in it."""

    def __init__(self, outbox: Outbox, ping: bytes, period_s: float) -> None:
        self._outbox = outbox
        self._ping = ping
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(period_s, self._put)

    def stop(self) -> None:
        """Once and for all; it may have been stopped before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _put(self) -> None:
        if not self._outbox.num_bytes:
            self._outbox.put(self._ping)
        self._timer = self._loop.call_later(self._period_s, self._put)


class Outbox:
    """Sends chunks of events in order: at once while the client's socket has room, else as it gets some. Their lines
    end nowhere but at their newlines, whatever a reader takes for the end of one.

    num_bytes: put and not yet taken by the socket.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None
        self.num_bytes = 0

    async def __aenter__(self) -> Outbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._sending is not None:
            self._sending.cancel()

    def put(self, chunk: bytes) -> None:
        """Sends a chunk of events, or keeps it until there is room; an empty one is nothing."""
        if not chunk:
            return
        chunk = escaped_line_ends(chunk)
        if self._sending is None:
            rest = begin(self._send(_body(chunk)))
            if rest is None:
                return
            self._sending = asyncio.create_task(self._send_rest(rest, len(chunk)))
        else:
            self._waiting.append(chunk)
        self.num_bytes += len(chunk)

    async def sent(self) -> None:
        """Waits until the socket has taken everything. Raises what sending raised."""
        if self._sending is not None:
            await self._sending

    async def _send_rest(self, rest: Awaitable[None], num_bytes: int) -> None:
        await rest
        self.num_bytes -= num_bytes
        while self._waiting:
            chunk = b"".join(self._waiting)
            self._waiting.clear()
            await self._send(_body(chunk))
            self.num_bytes -= len(chunk)
        self._sending = None


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
