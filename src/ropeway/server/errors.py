"""Errors as HTTP: the status of each, and its JSON body in OpenAI's or Anthropic's shape. Knows no bodies."""

from __future__ import annotations

import math
import re

import orjson
from starlette.responses import Response

from ropeway.errors import (
    BatchStoreError,
    EngineStoppedError,
    InvalidRequestError,
    OverloadedError,
    RateLimitedError,
    RequestTimeoutError,
    RequestTooLargeError,
    RopewayError,
    SlowClientError,
    UnknownModelError,
    UnsupportedFieldError,
)

JSON = "application/json"
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class UnknownRequestError(RopewayError):
    """No such request, as far as this caller is told."""


class BodyTooLargeError(InvalidRequestError):
    """The body exceeds what the server reads."""


class UnauthorizedError(RopewayError):
    """The API key is missing or wrong."""


class ForbiddenError(RopewayError):
    """The API key is not good for this."""


class StorageFullError(BatchStoreError):
    """The files that are kept take up all that they may."""


# Error class -> (status, type, code); the first that matches decides.
_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (BodyTooLargeError, 413, "invalid_request_error", "body_too_large"),
    (RequestTooLargeError, 400, "invalid_request_error", "context_length_exceeded"),
    (UnsupportedFieldError, 400, "invalid_request_error", "unsupported_parameter"),
    (InvalidRequestError, 400, "invalid_request_error", "invalid_value"),
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (UnauthorizedError, 401, "invalid_request_error", "invalid_api_key"),
    (UnknownRequestError, 404, "invalid_request_error", "not_found"),
    (ForbiddenError, 403, "invalid_request_error", "insufficient_permissions"),
    (RateLimitedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (OverloadedError, 503, "server_error", "overloaded"),
    (RequestTimeoutError, 504, "server_error", "timeout"),
    (SlowClientError, 408, "invalid_request_error", "request_timeout"),
    (EngineStoppedError, 503, "server_error", "engine_stopped"),
    (StorageFullError, 507, "server_error", "storage_full"),
    (BatchStoreError, 503, "server_error", "batches_unavailable"),
)

# After 408 and 413 the rest of a body may still be under way, and nobody wants it.
_HEADERS = {401: {"www-authenticate": "Bearer"}, 408: {"connection": "close"}, 413: {"connection": "close"}}


# Status -> the type that Anthropic's clients know; the rest is an api_error.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: Exception) -> tuple[int, bytes]:
    """(status, JSON body in OpenAI's shape) of an error."""
    status, message, error_type, param, code = _told(error)
    return status, error_json(message, error_type, param, code)


def anthropic_error_body(error: Exception) -> tuple[int, bytes]:
    """(status, JSON body in Anthropic's shape) of an error."""
    status, message, *_ = _told(error)
    return status, anthropic_error_json(status, message)


def _told(error: Exception) -> tuple[int, str, str, str | None, str | None]:
    """(status, message, type, param, code); what is not one of ours tells the client nothing of its inside."""
    for kind, status, error_type, code in _KINDS:
        if isinstance(error, kind):
            return status, str(error), error_type, getattr(error, "param", None), code
    return 500, "internal error; see the server's log", "server_error", None, "internal_error"


def error_json(message: str, error_type: str, param: str | None, code: str | None) -> bytes:
    """{"error": {...}} as OpenAI spells it."""
    return orjson.dumps({"error": {"message": _clean(message), "type": error_type, "param": param, "code": code}})


def anthropic_error_json(status: int, message: str) -> bytes:
    """{"type": "error", "error": {...}} as Anthropic spells it."""
    error = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": _clean(message)}
    return orjson.dumps({"type": "error", "error": error})


def is_anthropic(path: str) -> bool:
    """Whether who asks for this path expects errors as Anthropic spells them."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_response(error: Exception, path: str) -> Response:
    """The answer of an error, in the shape that clients of the path expect."""
    status, body = anthropic_error_body(error) if is_anthropic(path) else error_body(error)
    headers = _HEADERS.get(status)
    if isinstance(error, OverloadedError):
        headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1)))}
    return Response(body, status_code=status, media_type=JSON, headers=headers)


def json_response(value: object) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)


def _clean(message: str) -> str:
    # A message may quote the client's text, which may hold what UTF-8 cannot, and what would break the line.
    in_a_line = _CONTROLS.sub(lambda found: repr(found[0])[1:-1], message)
    return in_a_line.encode("utf-8", "replace").decode()
