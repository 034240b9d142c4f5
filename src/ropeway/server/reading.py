"""Reading a request's body: bounded in size, decoded from JSON. Knows no fields."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import orjson
from starlette.requests import Request

from ropeway.errors import InvalidRequestError
from ropeway.server.errors import BodyTooLargeError

DRAIN_RATIO = 8


async def read_json(request: Request, max_bytes: int) -> object:
    """The decoded body. Raises BodyTooLargeError where it is longer than max_bytes, InvalidRequestError if not JSON."""
    too_large = BodyTooLargeError(f"the body is larger than the {max_bytes} bytes that this server reads")
    body = bytearray()
    async for chunk in bounded_chunks(request, max_bytes, too_large):
        body += chunk
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON in UTF-8: {error}") from None


async def bounded_chunks(request: Request, max_bytes: int, too_large: BodyTooLargeError) -> AsyncGenerator[bytes, None]:
    """The body as it comes, up to max_bytes; raises `too_large` at the end of one that is longer.

    What is only somewhat too large is read to its end all the same: a client that is cut off while it sends sees a
    broken connection instead of the answer.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > DRAIN_RATIO * max_bytes:
        raise too_large
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            yield chunk
        elif num_bytes > DRAIN_RATIO * max_bytes:
            break
    if num_bytes > max_bytes:
        raise too_large
