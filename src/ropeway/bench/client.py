"""A small HTTP/1.1 client that reads token streams at little cost to the processor it shares with the server.

Owns connections, requests and the parsing of server-sent events. Knows nothing of workloads, pacing or statistics.
httptools splits the bytes and one pass reads the events, so that a chunk costs microseconds.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

from ropeway.errors import ConfigError

# Servers close idle connections after as little as 5 s (uvicorn); one that is about to be closed must not be reused.
_MAX_IDLE_S = 2.0


class ClientError(Exception):
    """A request failed: refused, cut off, or answered with something that is not what was asked for.

    status: of a refusal.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens: `prefix` is the path before /v1."""

    host: str
    port: int
    prefix: str
    is_tls: bool

    @staticmethod
    def parse(url: str) -> Endpoint:
        """Reads http(s)://host[:port][/prefix][/v1]. Raises: ConfigError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"the port of {url!r} is not a number in 0..65535") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not an HTTP address: expected something like http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Endpoint(parts.hostname, port or (443 if is_tls else 80), prefix, is_tls)


@dataclass(slots=True)
class StreamReader:
    """Reads the events of one streamed completion; every time is `clock` at the arrival of the bytes, in seconds.

    A chunk counts when it shows text. Servers may put several tokens in a chunk, so tokens are counted by the usage the
    server states, never by chunks.
    """

    clock: Callable[[], float] = time.perf_counter
    chunk_times_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    is_done: bool = False
    _partial: bytes = b""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the body. Raises: ClientError for an error event or a malformed one."""
        now = self.clock()
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.is_done = True
            return
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise ClientError(f"an event of the stream is not JSON: {error}") from error
        choices = event.get("choices")
        if choices:
            choice = choices[0]
            if choice.get("text"):
                self.chunk_times_s.append(now)
            self.end_s = now
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        usage = event.get("usage")
        if usage:
            self.num_prompt_tokens = usage.get("prompt_tokens")
            self.num_output_tokens = usage.get("completion_tokens")
        if "error" in event:
            raise ClientError(f"the stream ended in an error: {_error_message(event)}")


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request in flight; `feed` gets a successful body as it comes."""

    def __init__(self) -> None:
        self.transport: asyncio.WriteTransport | None = None
        self.parser: Any = None
        self.status = 0
        self.body = bytearray()
        self.is_reusable = False
        self.idle_since_s: float | None = None  # None: never used
        self.has_answer_begun = False
        self.feed: Callable[[bytes], None] | None = None
        self.answer: asyncio.Future[int] | None = None

    def request(self, head_and_body: bytes, feed: Callable[[bytes], None]) -> asyncio.Future[int]:
        """Sends a request; the future holds the status once the whole answer has come."""
        assert self.transport is not None and self.answer is None
        self.parser = httptools.HttpResponseParser(self)
        self.status, self.is_reusable, self.feed = 0, False, feed
        self.has_answer_begun = False
        self.body.clear()
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(head_and_body)
        return self.answer

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # --- asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports share no class with asyncio's

    def data_received(self, data: bytes) -> None:
        if self.parser is None:
            self.close()  # bytes that nobody asked for
            return
        self.has_answer_begun = True
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # httptools wraps what a callback raised; the ClientError is its context.
            cause = error.__context__
            self._finish(cause if isinstance(cause, ClientError) else error)
            self.close()
        except httptools.HttpParserError as error:
            self._finish(ClientError(f"the answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.is_reusable = False
        self._finish(ClientError(f"the connection was lost before the answer was whole{f': {exc}' if exc else ''}"))

    # --- httptools callbacks
    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == 200 and self.feed is not None:
            self.feed(body)
        else:
            self.body += body

    def on_message_complete(self) -> None:
        self.is_reusable = self.parser.should_keep_alive()
        if self.status == 200:
            self._finish(None)
        else:
            self._finish(ClientError(f"HTTP {self.status}: {_refusal_message(bytes(self.body))}", self.status))

    def _finish(self, error: BaseException | None) -> None:
        answer, self.answer, self.feed = self.answer, None, None
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(self.status)
        else:
            answer.set_exception(error)


def _error_message(fields: dict[str, Any]) -> str:
    error = fields.get("error", fields)
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200]


def _refusal_message(body: bytes) -> str:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:200].decode(errors="replace").strip()
    return _error_message(fields) if isinstance(fields, dict) else str(fields)[:200]


class Client:
    """Requests to one server over a pool of keep-alive connections; one connection per request in flight.

    admin_api_key: for what operates the server; without it api_key is sent there too.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._ssl = ssl.create_default_context() if endpoint.is_tls else None
        self._headers = self._headers_with(api_key)
        self._admin_headers = self._headers_with(admin_api_key or api_key)

    def _headers_with(self, key: str | None) -> str:
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        return f"Host: {self._endpoint.host}:{self._endpoint.port}\r\n{authorization}Accept: */*\r\n"

    def encode(self, method: str, path: str, body: bytes = b"", *, is_admin: bool = False) -> bytes:
        """The bytes of one request, to be made before the clock runs."""
        headers = self._admin_headers if is_admin else self._headers
        content = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._endpoint.prefix}{path} HTTP/1.1\r\n{headers}{content}\r\n".encode() + body

    async def stream(self, request: bytes, reader: StreamReader) -> None:
        """Sends an encoded request and feeds the answer to `reader` as it comes.

        Raises: ClientError when refused, cut off, malformed, or not whole within the timeout.
        """
        await self._exchange(request, reader.feed)

    async def get(self, path: str, *, is_admin: bool = False) -> bytes:
        """The body of a GET. Raises: ClientError."""
        body = bytearray()
        await self._exchange(self.encode("GET", path, is_admin=is_admin), body.extend)
        return bytes(body)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: bytes, feed: Callable[[bytes], None]) -> None:
        connection = await self._connect()
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.request(request, feed)
        except TimeoutError as error:
            raise ClientError(f"no whole answer within {self._timeout_s:g} s") from error
        except ClientError:
            if connection.idle_since_s is None or connection.has_answer_begun:
                raise
            # The server closed an idle connection as it was taken up again (llama.cpp's does after every stream):
            # the request was never read, so it goes out once more.
            await self._exchange(request, feed)
        finally:
            # A cancelled or timed-out request leaves its connection in mid-answer: never reusable.
            if connection.is_reusable:
                connection.idle_since_s = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            assert connection.idle_since_s is not None
            is_fresh = time.monotonic() - connection.idle_since_s < _MAX_IDLE_S
            if is_fresh and connection.transport is not None and not connection.transport.is_closing():
                return connection
            connection.close()
        endpoint = self._endpoint
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection, endpoint.host, endpoint.port, ssl=self._ssl
            )
        except OSError as error:
            raise ClientError(
                f"cannot connect to {endpoint.host}:{endpoint.port}: {error.strerror or error}"
            ) from error
        return connection
