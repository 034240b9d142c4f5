"""One HTTP request on a connection of its own, with nothing hidden: it may stop, dribble or leave anywhere."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping

import orjson


def request_bytes(
    method: str, path: str, fields: object = None, headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> bytes:
    """The bytes of a request that closes its connection. fields: the body as JSON; body: as it is."""
    if body is None:
        body = b"" if fields is None else orjson.dumps(fields)
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Exchange:
    """A connection with one request on it. Leaving the block closes the connection, whatever is under way."""

    def __init__(self, port: int, *, window_bytes: int | None = None) -> None:
        self._port = port
        self._window_bytes = window_bytes
        self.status: int | None = None
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Exchange:
        sock = socket.socket()
        sock.setblocking(False)
        if self._window_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._window_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
            # A small limit stops the stream reader from reading ahead for a client that has stopped.
            self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=1 << 14)
        except BaseException:
            sock.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.transport.abort()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> int:
        """Waits for the status, and returns it. Raises IncompleteReadError, ConnectionError where none comes."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        return self.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, after `head`."""
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self._reader.readexactly(int(self.headers["content-length"]))
            return
        while num_bytes := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(num_bytes + 2))[:-2]

    async def body(self) -> bytes:
        """The whole body, after `head`."""
        return b"".join([chunk async for chunk in self.chunks()])


async def fetch(port: int, request: bytes) -> tuple[int, bytes]:
    """(status, body) of a request on a connection of its own."""
    async with Exchange(port) as exchange:
        exchange.send(request)
        return await exchange.head(), await exchange.body()
