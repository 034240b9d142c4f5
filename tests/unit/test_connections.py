"""The way of an answer's chunks past ASGI: the same bytes on the wire, in order, while there is room, and no others.

And how long an answer may stay unread, on timers of the tests' own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from ropeway.engine.output_stream import OutputStream
from ropeway.errors import RopewayError
from ropeway.outputs import Delta
from ropeway.server.connections import BoundedConnection, ConnectionLimits
from ropeway.server.sse import BEGIN_CHUNKS, EventStreamResponse, Message, Receive, Send, StreamLimits
from ropeway.server.traffic import Traffic

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\n\r\n"
LIMITS = ConnectionLimits(header_timeout_s=60, body_timeout_s=60, write_timeout_s=50, max_connections=9)


class PlainWriter:
    """A delta's text is its event."""

    ping = b": ping\n\n"

    def first(self) -> bytes:
        return b"first;"

    def chunks(self, deltas: Any) -> bytes:
        return "".join(delta.text for delta in deltas).encode()

    def last(self) -> bytes:
        return b"last;"

    def failure(self, error: RopewayError) -> bytes:
        return b"failure;"

    def close(self) -> None: ...


class Socket:
    """A transport that remembers what it was given, one entry a write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.num_unsent_bytes = 0
        self.is_closed = self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.num_unsent_bytes

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Talk:
    """A connection on which one streamed answer was asked for. sent: the messages that went through ASGI."""

    def __init__(self, request: bytes = REQUEST, *, has_way: bool = True) -> None:
        self.socket = Socket()
        self.aborted: list[str] = []
        self.sent: list[Message] = []
        self.stream = OutputStream(["r"], lambda request_id, cause: self.aborted.append(request_id))
        self.has_way = has_way
        config = Config(self._app, interface="asgi3", log_config=None, ws="none", lifespan="off")
        config.load()
        self.loop = Loop()
        self.connection = BoundedConnection(
            config,
            ServerState(),
            {},
            self.loop,  # type: ignore[arg-type]
            limits=LIMITS,
            traffic=Traffic(),
        )
        self.connection.connection_made(self.socket)  # type: ignore[arg-type]
        self.connection.data_received(request)

    async def _app(self, scope: Message, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            self.sent.append(message)
            await send(message)

        if not self.has_way:
            del scope[BEGIN_CHUNKS]
        limits = StreamLimits(ping_s=60, max_unread_bytes=1000)
        await EventStreamResponse(self.stream, PlainWriter(), limits)(scope, receive, noted)

    def tell(self, text: str, reason: Any = None) -> None:
        """News of a step, the last where there is a reason."""
        self.stream.put(Delta("r", 0, text, (1,), reason))
        if reason is not None:
            self.stream.finish("r")
        self.stream.flush()

    @property
    def num_bodies_sent(self) -> int:
        return sum(message["type"] == "http.response.body" for message in self.sent)


class Loop:
    """The running loop, but for timers of what is sent: these ring when they are told to."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        timer = self._loop.call_later(delay_s, callback, *args)
        if delay_s == LIMITS.write_timeout_s:
            self._timers.append(timer)
        return timer

    def ring(self) -> None:
        """The time of the one timer that runs is over."""
        (timer,) = [each for each in self._timers if not each.cancelled()]
        self._timers.clear()
        timer._run()
        timer.cancel()


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def on_loop(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("has_way", [True, False])
def test_a_chunk_is_a_write_at_once_and_the_end_is_in_the_last(has_way: bool) -> None:
    async def scenario() -> None:
        talk = Talk(has_way=has_way)
        await turns()
        talk.tell("one;")
        assert talk.socket.writes[1:] == [b"6\r\nfirst;\r\n", b"4\r\none;\r\n"]
        talk.tell("two;", "length")
        assert talk.socket.writes[3:] == [b"9\r\ntwo;last;\r\n0\r\n\r\n"]
        await turns()
        assert talk.num_bodies_sent == (1 if has_way else 3)
        assert not talk.aborted and not talk.socket.is_closed
        talk.connection.data_received(REQUEST)  # the connection is good for another
        await turns()
        assert talk.socket.writes[-1].endswith(b"last;\r\n0\r\n\r\n")

    on_loop(scenario)


def test_chunks_wait_while_the_socket_is_full_and_keep_their_order() -> None:
    async def scenario() -> None:
        talk = Talk()
        await turns()
        talk.tell("one;")
        talk.connection.pause_writing()
        num_writes = len(talk.socket.writes)
        for text in ("two;", "three;"):
            talk.tell(text)
            await turns()
        assert len(talk.socket.writes) == num_writes
        talk.connection.resume_writing()
        await turns()
        assert talk.socket.writes[num_writes:] == [b"4\r\ntwo;\r\n", b"6\r\nthree;\r\n"]
        talk.tell("four;")
        assert talk.socket.writes[-1] == b"5\r\nfour;\r\n" and talk.num_bodies_sent == 2

    on_loop(scenario)


def test_an_answer_that_begins_on_a_full_socket_waits() -> None:
    async def scenario() -> None:
        talk = Talk()
        talk.connection.pause_writing()
        await turns()
        talk.tell("one;")
        assert talk.socket.writes == []
        talk.connection.resume_writing()
        await turns()
        assert talk.socket.writes[1:] == [b"6\r\nfirst;\r\n", b"4\r\none;\r\n"]

    on_loop(scenario)


def test_nothing_is_written_to_a_connection_that_is_lost() -> None:
    async def scenario() -> None:
        talk = Talk()
        await turns()
        talk.tell("one;")
        num_writes = len(talk.socket.writes)
        talk.connection.connection_lost(ConnectionResetError())
        talk.tell("two;")
        await turns()
        assert len(talk.socket.writes) == num_writes and talk.aborted == ["r"]

    on_loop(scenario)


def test_another_framing_goes_through_uvicorn() -> None:
    async def scenario() -> None:
        talk = Talk(REQUEST.replace(b"POST", b"HEAD"))
        await turns()
        talk.tell("one;")
        assert len(talk.socket.writes) == 1 and talk.num_bodies_sent == 2  # a head has no body

    on_loop(scenario)


def test_who_reads_something_of_a_large_answer_in_time_gets_all_of_it() -> None:
    async def scenario() -> None:
        talk = Talk()
        await turns()
        talk.socket.num_unsent_bytes = 1_000_000
        talk.connection.pause_writing()
        for talk.socket.num_unsent_bytes in (999_999, 500_000, 70_000):
            talk.loop.ring()
            assert not talk.socket.is_aborted
        talk.loop.ring()
        assert talk.socket.is_aborted, "nothing was read since"

    on_loop(scenario)


def test_what_an_answer_leaves_unread_is_waited_for_as_long() -> None:
    async def scenario() -> None:
        talk = Talk()
        await turns()
        talk.socket.num_unsent_bytes = 2000
        talk.tell("one;", "length")
        await turns()
        talk.socket.num_unsent_bytes = 1000
        talk.loop.ring()
        assert not talk.socket.is_aborted
        talk.loop.ring()
        assert talk.socket.is_aborted

    on_loop(scenario)


def test_the_time_of_one_answer_does_not_cut_off_the_next() -> None:
    async def scenario() -> None:
        talk = Talk()
        await turns()
        talk.socket.num_unsent_bytes = 1000
        talk.tell("one;", "length")
        await turns()
        talk.stream = OutputStream(["r"], lambda request_id, cause: None)
        talk.connection.data_received(REQUEST)
        await turns()
        talk.socket.num_unsent_bytes = 3000  # of the answer that has begun
        talk.loop.ring()
        assert not talk.socket.is_aborted
        talk.connection.pause_writing()  # nothing more fits: from here on the client has the whole time
        talk.socket.num_unsent_bytes = 2000
        talk.loop.ring()
        assert not talk.socket.is_aborted

    on_loop(scenario)
