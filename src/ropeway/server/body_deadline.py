"""How long the body of a request may take. Knows no routes and no sockets."""

from __future__ import annotations

import asyncio
from typing import Any

from ropeway.errors import SlowClientError
from ropeway.server.connections import CUT_OFF
from ropeway.server.sse import Begun, Message, Receive, Send
from ropeway.server.traffic import Traffic

# A body may take a second more for each of these: dribbling is bounded, and a large upload may be slow.
BODY_BYTES_PER_S = 64 << 10


class BodyDeadline:
    """ASGI middleware: whoever reads a body that is late gets SlowClientError from `receive`, which becomes a 408.

    A disconnect tells why the server cut the connection, where it did: {"type": "http.disconnect", "cause": error}.
    """

    def __init__(self, app: Any, *, timeout_s: float, traffic: Traffic) -> None:
        self._app = app
        self._timeout_s = timeout_s
        self._traffic = traffic

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = _TimedBody(scope, receive, self._timeout_s, self._traffic).receive
        await self._app(scope, receive, send)


class _TimedBody:
    """The time of a body begins when it is asked for: until then it is not the client that others wait for."""

    def __init__(self, scope: Message, receive: Receive, timeout_s: float, traffic: Traffic) -> None:
        self._scope = scope
        self._receive = receive
        self._timeout_s = timeout_s
        self._traffic = traffic
        self._start_s: float | None = None
        self._num_bytes = 0
        self._is_complete = False

    async def receive(self) -> Message:
        if self._is_complete:
            return self._explained(await self._receive())
        loop = asyncio.get_running_loop()
        if self._start_s is None:
            self._start_s = loop.time()
        allowed_s = self._timeout_s + self._num_bytes / BODY_BYTES_PER_S
        receiving = Begun(self._receive())
        try:
            if receiving.is_done:  # most bodies come with their headers
                message = await receiving
            else:
                async with asyncio.timeout_at(self._start_s + allowed_s):
                    message = await receiving
        except TimeoutError:
            self._traffic.slow["body"] += 1
            raise SlowClientError(
                f"the body was not complete after {allowed_s:.1f} s, with {self._num_bytes} bytes of it received: send "
                f"it within {self._timeout_s:g} s and one more for every {BODY_BYTES_PER_S} bytes"
            ) from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
        return self._explained(message)

    def _explained(self, message: Message) -> Message:
        if message["type"] == "http.disconnect" and CUT_OFF in self._scope:
            return {**message, "cause": self._scope[CUT_OFF]}
        return message
