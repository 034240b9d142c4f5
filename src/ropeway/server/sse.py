"""Answers over HTTP: server-sent events while they grow, and the watch for clients that leave. Knows no JSON.

The text of a step leaves within the event loop's one wake-up for that step: a streamed token costs one bytes
concatenation and one write to its connection, no task switch and no framework objects. While a client's socket is full
its events are gathered, up to a bound in bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.responses import Response

from ropeway.engine.output_stream import OutputStream
from ropeway.errors import RopewayError, SlowClientError
from ropeway.line_ends import escaped_line_ends
from ropeway.outputs import Delta

logger = logging.getLogger(__name__)

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# A chunk of a body whose answer has begun: whether the connection has taken it, or else `send` must.
TryWrite = Callable[[bytes], bool]
# In a request's scope, where its connection offers that: called once its answer has begun, it gives a `TryWrite`, or
# None. That is a way past the `send`s of whatever stands in between, which look at no body.
BEGIN_CHUNKS = "ropeway.begin_chunks"

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
            await self._serve(scope, receive, send)
        finally:
            self._writer.close()

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        stream, writer = self._stream, self._writer
        async with closed_on_disconnect(receive, stream), Outbox(send) as outbox:
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            outbox.try_write = scope[BEGIN_CHUNKS]() if BEGIN_CHUNKS in scope else None
            try:
                outbox.put(writer.first())
                too_slow = await _Passage(stream, writer, outbox, self._limits).pass_on()
                if too_slow is not None:
                    outbox.end(writer.failure(too_slow))
                elif not outbox.is_ended:  # a stream that was closed before its end: the client has left
                    outbox.end(writer.last() if stream.is_finished else b"")
            except RopewayError as error:
                outbox.end(writer.failure(error))
            await outbox.sent()


class _Passage:
    """The way of one answer from its stream through its writer into its outbox."""

    __slots__ = ("_limits", "_outbox", "_pinger", "_stream", "_too_slow", "_writer")

    def __init__(self, stream: OutputStream, writer: EventWriter, outbox: Outbox, limits: StreamLimits) -> None:
        self._stream = stream
        self._writer = writer
        self._outbox = outbox
        self._limits = limits
        self._pinger: Pinger | None = Pinger(outbox, writer.ping, limits.ping_s)
        self._too_slow: SlowClientError | None = None

    async def pass_on(self) -> SlowClientError | None:
        """All of the answer, or what was wrong where too much of it stayed unread."""
        try:
            await self._stream.pass_on(self._write)
        finally:
            self._stop_pinging()
        if self._too_slow is not None:
            logger.warning("%s", self._too_slow)
        return self._too_slow

    def _write(self, deltas: list[Delta]) -> None:
        self._stop_pinging()
        outbox, stream, most = self._outbox, self._stream, self._limits.max_unread_bytes
        chunk = self._writer.chunks(deltas)
        if stream.is_whole and not outbox.num_bytes and len(chunk) <= most:
            outbox.end(chunk + self._writer.last())  # in one write
            return
        outbox.put(chunk)
        if outbox.num_bytes > most:
            self._too_slow = SlowClientError(
                f"the client has left {outbox.num_bytes} bytes of its stream unread, and at most {most} are kept for "
                "it: the rest of the answer was aborted; read faster, or ask for less"
            )
            stream.close(self._too_slow)

    def _stop_pinging(self) -> None:
        if self._pinger is not None:
            self._pinger.stop()
            self._pinger = None


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

    try_write: what takes chunks without a `send`, once there is such a thing.
    num_bytes: put and not yet taken by the socket. is_ended: nothing may be put any more.
    """

    __slots__ = ("_send", "_sending", "_waiting", "is_ended", "num_bytes", "try_write")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.try_write: TryWrite | None = None
        self.is_ended = False
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
        if self._sending is None and self.try_write is not None and self.try_write(chunk):
            return
        self._pass(chunk)

    def end(self, chunk: bytes) -> None:
        """Puts the last chunk, which may be empty, and ends the answer with it."""
        self.is_ended = True
        self.try_write = None
        self._pass(escaped_line_ends(chunk))

    def _pass(self, chunk: bytes) -> None:
        if self._sending is None:
            rest = begin(self._send(self._body(chunk)))
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
            await self._send(self._body(chunk))
            self.num_bytes -= len(chunk)
        self._sending = None

    def _body(self, chunk: bytes) -> Message:
        """The message of everything that has been put and was not sent before."""
        return {"type": "http.response.body", "body": chunk, "more_body": not self.is_ended}


class Begun(Generic[T]):
    """A coroutine that has run as far as it goes without waiting; await the rest. is_done: there is none.

    Most calls of `send` and `receive` wait for nothing, and a task switch or a clock for each costs more than they do.
    """

    def __init__(self, call: Awaitable[T]) -> None:
        self._steps = call.__await__()
        self.is_done = False
        self._advance(functools.partial(next, self._steps))

    def __await__(self) -> Generator[Any, Any, T]:
        while not self.is_done:
            try:
                answer = yield self._waited_for
            except BaseException as error:
                self._advance(functools.partial(self._steps.throw, error))
            else:
                self._advance(functools.partial(self._steps.send, answer))
        return self._result

    def _advance(self, step: Callable[[], Any]) -> None:
        try:
            self._waited_for = step()
        except StopIteration as end:
            self.is_done = True
            self._result: T = end.value


def begin(call: Awaitable[None]) -> Awaitable[None] | None:
    """Runs a coroutine as far as it goes without waiting: None where that was to its end, or else the rest to await."""
    begun = Begun(call)
    return None if begun.is_done else begun
