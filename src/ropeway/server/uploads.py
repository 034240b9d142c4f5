"""Reading an upload: a multipart form with one file, bounded in size, never whole in memory. Knows no purposes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ropeway.errors import BatchStoreError, InvalidRequestError
from ropeway.server.errors import BodyTooLargeError
from ropeway.server.reading import bounded_chunks

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
    too_large = BodyTooLargeError(f"the file is larger than the {max_bytes} bytes that this server takes")
    stream = bounded_chunks(request, max_bytes + FORM_BYTES, too_large)
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
