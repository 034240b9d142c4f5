"""Errors as HTTP: the status and the OpenAI-shaped JSON body of each. Knows no endpoints."""

from __future__ import annotations

import math

import orjson
from starlette.responses import Response

from ropeway.errors import (
    EngineStoppedError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    RequestTooLargeError,
    RopewayError,
    UnknownModelError,
    UnsupportedFieldError,
)

JSON = "application/json"


class BodyTooLargeError(InvalidRequestError):
    """The body exceeds what the server reads."""


class UnauthorizedError(RopewayError):
    """The API key is missing or wrong."""


# Error class -> (status, type, code); the first that matches decides.
_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (BodyTooLargeError, 413, "invalid_request_error", "body_too_large"),
    (RequestTooLargeError, 400, "invalid_request_error", "context_length_exceeded"),
    (UnsupportedFieldError, 400, "invalid_request_error", "unsupported_parameter"),
    (InvalidRequestError, 400, "invalid_request_error", "invalid_value"),
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (UnauthorizedError, 401, "invalid_request_error", "invalid_api_key"),
    (OverloadedError, 503, "server_error", "overloaded"),
    (RequestTimeoutError, 504, "server_error", "timeout"),
    (EngineStoppedError, 503, "server_error", "engine_stopped"),
)

# After 413 the rest of a body may still be under way, and nobody wants it.
_HEADERS = {401: {"www-authenticate": "Bearer"}, 413: {"connection": "close"}}


def error_body(error: Exception) -> tuple[int, bytes]:
    """(status, JSON body) of an error; what is not one of ours tells the client nothing of its inside."""
    for kind, status, error_type, code in _KINDS:
        if isinstance(error, kind):
            return status, error_json(str(error), error_type, getattr(error, "param", None), code)
    return 500, error_json("internal error; see the server's log", "server_error", None, "internal_error")


def error_json(message: str, error_type: str, param: str | None, code: str | None) -> bytes:
    """{"error": {...}} as OpenAI spells it."""
    # A message may quote the client's text, which may hold what UTF-8 cannot.
    clean = message.encode("utf-8", "replace").decode()
    return orjson.dumps({"error": {"message": clean, "type": error_type, "param": param, "code": code}})


def error_response(error: Exception) -> Response:
    status, body = error_body(error)
    headers = _HEADERS.get(status)
    if isinstance(error, OverloadedError):
        headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1)))}
    return Response(body, status_code=status, media_type=JSON, headers=headers)
