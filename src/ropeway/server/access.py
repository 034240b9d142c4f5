"""The guard before every route: API keys and their rates, before a byte of the body is read. Knows no bodies."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ropeway.errors import RopewayError
from ropeway.server.errors import ForbiddenError, UnauthorizedError, error_response
from ropeway.server.sse import Message, Receive, Send
from ropeway.server.tenants import Caller, KeyRing

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
ADMIN_PATHS = frozenset({"/metrics", "/pause", "/resume", "/abort_requests"})
_CALLER = "ropeway.caller"


def caller_of(request: Request) -> Caller:
    """Who sent a request that has passed the guard."""
    caller = request.scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller


class AccessGuard:
    """ASGI middleware: finds the caller behind `Authorization: Bearer KEY` or `x-api-key: KEY`, and holds its rates."""

    def __init__(self, app: Any, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[_CALLER] = self._admit(scope)
            except RopewayError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Message) -> Caller:
        path = scope["path"]
        if path in OPEN_PATHS:
            return self._keys.anyone
        key = _key(scope)
        caller = None if key is None else self._keys.caller(key)
        if caller is None:
            if self._keys.has_keys:
                raise UnauthorizedError(
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY or as x-api-key: KEY"
                )
            caller = self._keys.anyone
        if path in ADMIN_PATHS:
            if not caller.is_admin:
                raise ForbiddenError(f"{path} needs the key that the server was given as --admin-api-key")
        elif scope["method"] == "POST":
            caller.admit()
        return caller


def _key(scope: Message) -> bytes | None:
    """The one key of a request; None where there is none, or more than one."""
    for name, prefix in ((b"authorization", b"Bearer "), (b"x-api-key", b"")):
        given = [value for header, value in scope["headers"] if header == name]
        if given:
            is_one = len(given) == 1 and given[0].startswith(prefix)
            return given[0][len(prefix) :] if is_one else None
    return None
