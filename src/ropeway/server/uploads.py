"""Reading an upload: a multipart form with one file, bounded in size, never whole in memory. Knows no purposes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ropeway.errors import BatchStoreError, InvalidRequestError
from ropeway.server.errors import BodyTooLargeError
from ropeway.server.reading import DRAIN_RATIO

FORM_BYTES = 64 << 10  # what a form may have around its file
MAX_FIELDS = 16


@dataclass(frozen=True, slots=True)
class Upload:
    """file: spooled to disk beyond a mebibyte. fields: the others, as text."""

    file: UploadFile
    fields: Mapping[str, str]


@asynccontextmanager
async def read_upload(request: Request, max_bytes: int) -> AsyncIterator[Upload]:
    """The form of a request, open inside. max_bytes: of its file.

    Raises BodyTooLargeError, InvalidRequestError for what is no form with one `file`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise InvalidRequestError(f"an upload is multipart/form-data with a file, not {media_type[:60]!r}")
    stream = _bounded(request, max_bytes)
    parser = MultiPartParser(request.headers, stream, max_files=1, max_fields=MAX_FIELDS, max_part_size=FORM_BYTES)
    try:
        form = await parser.parse()
    except OSError as error:
        raise BatchStoreError(f"the upload cannot be kept: {error.strerror}") from None
    except (MultiPartException, KeyError, UnicodeError, LookupError) as error:
        raise InvalidRequestError(f"the form cannot be read: {getattr(error, 'message', None) or error!r}") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidRequestError("the form has no file; send one as the part named file", param="file")
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        yield Upload(file, fields)
    finally:
        await form.close()


async def _bounded(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body, as it comes. What is only somewhat too large is read to its end, as `read_json` does."""
    max_bytes += FORM_BYTES
    too_large = BodyTooLargeError(f"the file is larger than the {max_bytes - FORM_BYTES} bytes that this server takes")
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
