"""A name for every HTTP request: taken from `x-request-id` or drawn, sent back, and put into the log. Knows no routes.

Each is counted when it has ended; with access_log, there is a line for it too.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any

from starlette.requests import Request

from ropeway.server.logs import FIELDS, current_request_id
from ropeway.server.sse import Message, Receive, Send
from ropeway.server.traffic import CLIENT_CLOSED_REQUEST, Traffic

access_logger = logging.getLogger("ropeway.access")

REQUEST_ID = "ropeway.request_id"
ANSWER_ID = "ropeway.answer_id"
STATUS = "ropeway.status"  # of the answer; 0 until it has begun
_WELL_FORMED = re.compile(rb"[!-~]{1,128}")


def request_id_of(request: Request) -> str:
    """The name of a request that came through `RequestIds`."""
    return str(request.scope[REQUEST_ID])


class RequestIds:
    """ASGI middleware. An `x-request-id` that is no 1 to 128 visible ASCII characters is replaced by one drawn."""

    def __init__(self, app: Any, *, has_access_log: bool, traffic: Traffic) -> None:
        self._app = app
        self._has_access_log = has_access_log
        self._traffic = traffic

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        is_usable = len(given) == 1 and _WELL_FORMED.fullmatch(given[0])
        request_id = given[0].decode() if is_usable else secrets.token_hex(16)
        scope[REQUEST_ID], scope[STATUS] = request_id, 0
        start_s = time.monotonic()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope[STATUS] = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        # Never reset: the task is the request's own, and what the server logs of its failure belongs to it too.
        current_request_id.set(request_id)
        try:
            await self._app(scope, receive, send_named)
        finally:
            # Before a route was found, only a path that is one says more than that.
            route = scope["route"].path if "route" in scope else scope["path"]
            self._traffic.count(scope["method"], route, scope[STATUS] or CLIENT_CLOSED_REQUEST)
            if self._has_access_log:
                log_access(scope, scope[STATUS], 1000 * (time.monotonic() - start_s))


def log_access(scope: Message, status: int, lasted_ms: float) -> None:
    """A line of an answered request, without its query string, which may hold anything."""
    answer_id = scope.get(ANSWER_ID)
    path = scope["path"].encode("unicode_escape").decode()  # a line stays a line
    told = {"method": scope["method"], "path": path, "status": status, "duration_ms": round(lasted_ms, 1)}
    access_logger.info(
        "%s %s %d %.1f ms %s",
        *(scope["method"], path, status, lasted_ms, answer_id or "-"),
        extra={FIELDS: told | ({} if answer_id is None else {"answer_id": answer_id})},
    )
