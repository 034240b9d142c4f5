"""One connection of a client: how long it may take, how much it may hold. Knows sockets and HTTP; knows no JSON bodies.

A client has `header_timeout_s` from its first byte (or its connecting) to the end of its headers, which may be
MAX_HEADER_BYTES; the time of a body is kept by `BodyDeadline`, and here only where nobody waits for it any more. A
client that takes nothing of its answer for `write_timeout_s` while more waits is cut off, and what it asked for is
aborted.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from ropeway.errors import SlowClientError
from ropeway.server.errors import error_json
from ropeway.server.request_ids import REQUEST_ID
from ropeway.server.sse import BEGIN_CHUNKS, TryWrite
from ropeway.server.traffic import Phase, Traffic

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
# In a request's scope: why its client was cut off.
CUT_OFF = "ropeway.cut_off"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """header_timeout_s, write_timeout_s: see this module. body_timeout_s: for the rest of a body that nobody reads.
    max_connections: more are answered 503 and closed.
    """

    header_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float
    max_connections: int


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with bounds. Three timers: of what is received, of what is sent, and uvicorn's own of a
    connection that rests between two requests.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        traffic: Traffic,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._traffic = traffic
        self._receiving: Phase | None = None
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_unsent_bytes = 0  # when the timer of what is sent began
        self._num_header_bytes = 0
        self._is_reading = False
        self._chunks: _ChunkWriter | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._traffic.num_connections += 1
        if self._traffic.num_connections > self._limits.max_connections:
            self._traffic.num_refused_connections += 1
            self._refuse(503, "too many connections are open; try again later", "overloaded", retry_after_s=1)
            return
        self._begin_receiving("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._traffic.num_connections -= 1
        self._end_receiving()
        self._stop_send_timer()
        if self._chunks is not None:
            self._chunks.has_room = False
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._is_reading = True
        if self._receiving is None and not self._is_answering:
            self._begin_receiving("headers")
        is_in_headers = self._receiving == "headers"
        try:
            super().data_received(data)
        finally:
            self._is_reading = False
        if is_in_headers and self._receiving == "headers":
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"the headers are longer than {MAX_HEADER_BYTES} bytes", "headers_too_large")
        if self._receiving is not None and self._receive_timer is None:
            self._start_receive_timer(self._receiving)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._receiving is None:  # behind another request on the same connection
            self._begin_receiving("headers")

    def on_headers_complete(self) -> None:
        self._begin_receiving("body")
        super().on_headers_complete()
        cast(dict[str, Any], self.cycle.scope)[BEGIN_CHUNKS] = functools.partial(_begin_chunks, weakref.ref(self))

    def on_message_complete(self) -> None:
        self._end_receiving()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.transport.get_write_buffer_size():
            self._start_send_timer()  # nobody waits for what is left; closing would wait for ever
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._chunks is not None:
            self._chunks.has_room = False
        self._start_send_timer()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()
        if self._chunks is not None:
            self._chunks.has_room = True

    def begin_chunks(self) -> TryWrite | None:
        """What takes the chunks of the answer that has begun; None where it is framed in another way, or nobody is
        there any more.
        """
        cycle = self.cycle
        if not cycle.chunked_encoding or cycle.disconnected or cycle.response_complete:
            return None
        self._chunks = _ChunkWriter(self.transport, has_room=not self.flow.write_paused)
        return self._chunks.try_write

    def _begin_receiving(self, phase: Phase) -> None:
        self._end_receiving()
        self._receiving, self._num_header_bytes = phase, 0
        if not self._is_reading:  # what most requests begin is over when all that has come has been read
            self._start_receive_timer(phase)

    def _start_receive_timer(self, phase: Phase) -> None:
        limits = self._limits
        timeout_s = limits.header_timeout_s if phase == "headers" else limits.body_timeout_s
        # What has come while the loop was late is read before the second timer runs.
        self._receive_timer = self.loop.call_later(timeout_s, self._on_receive_almost_late, phase)

    def _end_receiving(self) -> None:
        self._receiving = None
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _on_receive_almost_late(self, phase: Phase) -> None:
        self._receive_timer = self.loop.call_later(0, self._on_receive_timeout, phase)

    def _on_receive_timeout(self, phase: Phase) -> None:
        if self.transport.is_closing():  # after an answer to what was no HTTP, which may be unread
            self.transport.abort()
            return
        if self.flow.read_paused or self._is_answering:
            # It is not the client who is late, the application keeps the time, or nothing may be said just now.
            self._begin_receiving(phase)
            return
        self._end_receiving()
        self._traffic.slow[phase] += 1
        if phase == "headers":
            message = f"the headers were not complete after {self._limits.header_timeout_s:g} s"
            self._refuse(408, message, "request_timeout")
        else:
            self.transport.abort()

    def _start_send_timer(self) -> None:
        self._stop_send_timer()
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._limits.write_timeout_s, self._on_send_timeout)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _on_send_timeout(self) -> None:
        self._send_timer = None
        num_unsent_bytes = self.transport.get_write_buffer_size()
        if not num_unsent_bytes or (self._is_answering and not self.flow.write_paused):
            return  # another answer has begun since: it gets a timer of its own when it is too much, or over
        if num_unsent_bytes < self._num_unsent_bytes:  # nothing was added meanwhile, so the client has read
            self._start_send_timer()
            return
        self._traffic.slow["answer"] += 1
        error = SlowClientError(
            f"the client has not read its answer for {self._limits.write_timeout_s:g} s: the connection is closed, and "
            "what it asked for aborted"
        )
        scope = cast(dict[str, Any], self.cycle.scope)
        scope[CUT_OFF] = error
        logger.warning("request %s: %s", scope.get(REQUEST_ID, "-"), error)
        self.transport.abort()

    def _refuse(self, status: int, message: str, code: str, retry_after_s: int | None = None) -> None:
        """An answer without a request, and the end of the connection."""
        self._end_receiving()
        if self._is_answering:
            self.transport.abort()  # it would be in the middle of another answer
            return
        body = error_json(message, "invalid_request_error" if status < 500 else "server_error", None, code)
        lines = [STATUS_LINE[status], b"content-type: application/json\r\nconnection: close\r\n"]
        if retry_after_s is not None:
            lines.append(b"retry-after: %d\r\n" % retry_after_s)
        self.transport.write(b"".join([*lines, b"content-length: %d\r\n\r\n" % len(body), body]))
        self.transport.close()
        self._start_send_timer()


def _begin_chunks(connection: weakref.ref[BoundedConnection]) -> TryWrite | None:
    """For the scope of a request, which its connection holds in turn."""
    found = connection()
    return None if found is None else found.begin_chunks()


class _ChunkWriter:
    """Writes chunks of a streamed answer as uvicorn's `send` does, without a coroutine and a message for each.

    has_room: kept by the connection; without room `send` waits for some, and knows what becomes of a lost connection.
    """

    __slots__ = ("_write", "has_room")

    def __init__(self, transport: asyncio.Transport, *, has_room: bool) -> None:
        self._write = transport.write
        self.has_room = has_room

    def try_write(self, chunk: bytes) -> bool:
        if self.has_room:
            self._write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            return True
        return False
