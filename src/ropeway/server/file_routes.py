"""OpenAI's files, as far as batches need them: create, list, retrieve, content, delete. Knows no engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from ropeway.batch.journal import Journal
from ropeway.batch.records import FileRecord, Page
from ropeway.errors import BatchStoreError, InvalidRequestError
from ropeway.server.access import caller_of
from ropeway.server.batch_service import BatchService
from ropeway.server.config import ServerConfig
from ropeway.server.errors import BodyTooLargeError, StorageFullError, UnknownRequestError, json_response
from ropeway.server.tenants import Caller
from ropeway.server.uploads import read_upload

MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 30 * 24 * 3600
MAX_FILE_PAGE = 10_000
MAX_FILENAME_CHARACTERS = 255
# What a file takes up at the least, for the bound on all: an empty one is not free.
FILE_OVERHEAD_BYTES = 4096


def file_routes(service: BatchService, config: ServerConfig) -> list[Route]:
    """The routes under /v1/files."""
    files = _Files(service, config)
    return [
        Route("/v1/files", files.create, methods=["POST"]),
        Route("/v1/files", files.list, methods=["GET"]),
        Route("/v1/files/{file_id}", files.retrieve, methods=["GET"]),
        Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", files.content, methods=["GET"]),
    ]


class _Files:
    def __init__(self, service: BatchService, config: ServerConfig) -> None:
        self._service = service
        self._max_file_bytes = config.max_batch_file_bytes
        self._max_stored_bytes = config.max_batch_storage_bytes

    async def create(self, request: Request) -> Response:
        store = await self._service.store()
        caller = caller_of(request)
        async with read_upload(request, self._max_file_bytes) as upload:
            lifetime_s = _checked_fields(upload.fields)
            file_id = f"file-{secrets.token_hex(16)}"
            num_bytes = upload.file.size or 0
            if num_bytes > self._max_file_bytes:
                raise BodyTooLargeError(f"the file has {num_bytes} bytes; this server takes {self._max_file_bytes}")
            num_files, stored_bytes = await store.journal.run(lambda journal: journal.num_stored())
            if stored_bytes + num_bytes + FILE_OVERHEAD_BYTES * (num_files + 1) > self._max_stored_bytes:
                raise StorageFullError(
                    f"{num_files} files with {stored_bytes} bytes are stored, of {self._max_stored_bytes} that may be "
                    "(--max-batch-storage); delete some"
                )
            try:
                num_bytes = await asyncio.to_thread(store.directory.store, file_id, upload.file.file)
            except OSError as error:
                raise BatchStoreError(f"the file cannot be stored: {error.strerror}") from None
            now_s = int(self._service.clock())
            record = FileRecord(
                file_id=file_id,
                tenant=caller.tenant,
                filename=(upload.file.filename or "upload")[-MAX_FILENAME_CHARACTERS:],
                purpose="batch",
                num_bytes=num_bytes,
                created_s=now_s,
                expires_s=now_s + lifetime_s,
            )
        try:
            await store.journal.run(lambda journal: journal.add_file(record))
        except BatchStoreError:
            await asyncio.to_thread(store.directory.remove, file_id)
            raise
        return json_response(file_object(record))

    async def list(self, request: Request) -> Response:
        store = await self._service.store()
        caller = caller_of(request)
        purpose = request.query_params.get("purpose")
        page = page_of(request.query_params, default_limit=MAX_FILE_PAGE, max_limit=MAX_FILE_PAGE)
        records = await store.journal.run(lambda journal: journal.files(seen_by(caller), purpose, page.with_one_more))
        return json_response(list_object([file_object(each) for each in records], page.limit))

    async def retrieve(self, request: Request) -> Response:
        return json_response(file_object(await self._find(request)))

    async def content(self, request: Request) -> Response:
        store = await self._service.store()
        record = await self._find(request)
        path = store.directory.file_path(record.file_id)
        if not await asyncio.to_thread(path.exists):
            raise UnknownRequestError(
                f"the content of {record.file_id} is gone: somebody has removed it from its place"
            )
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        store = await self._service.store()
        record = await self._find(request)

        def delete(journal: Journal) -> None:
            readers = journal.readers_of(record.file_id)
            if readers:
                raise InvalidRequestError(f"the file is being read by {readers[0]}; cancel that, or wait for its end")
            journal.delete_file(record.file_id)

        await store.journal.run(delete)
        await asyncio.to_thread(store.directory.remove, record.file_id)
        return json_response({"id": record.file_id, "object": "file", "deleted": True})

    async def _find(self, request: Request) -> FileRecord:
        store = await self._service.store()
        file_id = request.path_params["file_id"]
        return visible_file(await store.journal.run(lambda journal: journal.file(file_id)), file_id, caller_of(request))


def visible_file(record: FileRecord | None, file_id: str, caller: Caller) -> FileRecord:
    """Raises UnknownRequestError where there is none, also where it is another tenant's."""
    if record is None or not caller.may_see(record.tenant):
        raise UnknownRequestError(f"no file {file_id[:100]!r} is stored")
    return record


def file_object(record: FileRecord) -> dict[str, object]:
    """As OpenAI spells it."""
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_s,
        "expires_at": record.expires_s,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def seen_by(caller: Caller) -> str | None:
    """The tenant whose files and batches a caller's lists hold; None for everybody's."""
    return None if caller.is_admin else caller.tenant


def page_of(query: Mapping[str, str], *, default_limit: int, max_limit: int) -> Page:
    """after, limit and order of a list. Raises InvalidRequestError."""
    limit, order = query.get("limit", str(default_limit)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 8 and 1 <= int(limit) <= max_limit):
        raise InvalidRequestError(f"limit must be from 1 to {max_limit}, not {limit[:20]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, not {order[:20]!r}", param="order")
    return Page(query.get("after"), int(limit), order == "asc")


def list_object(entries: list[dict[str, object]], limit: int) -> dict[str, object]:
    """A page as OpenAI spells it, of entries of which there is one too many where more follow."""
    shown = entries[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(entries) > limit,
    }


def _checked_fields(fields: Mapping[str, str]) -> int:
    """The lifetime that the fields of an upload ask for. Raises InvalidRequestError."""
    known = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
    unknown = sorted(fields.keys() - set(known))
    if unknown:
        raise InvalidRequestError(f"unknown field {unknown[0][:100]!r}", param=unknown[0][:100])
    if fields.get("purpose") != "batch":
        raise InvalidRequestError(
            f"purpose must be batch, not {fields.get('purpose', '')[:40]!r}: files are for batches only",
            param="purpose",
        )
    anchor, seconds = (fields.get(name) for name in known[1:])
    if anchor is None and seconds is None:
        return MAX_LIFETIME_S
    if seconds is not None and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10:
        return lifetime_of({"anchor": anchor, "seconds": int(seconds)}, "expires_after")
    raise InvalidRequestError("expires_after[seconds] must be a whole number", param="expires_after")


def lifetime_of(asked: Mapping[str, Any] | None, name: str) -> int:
    """Seconds that a file is kept, of OpenAI's {"anchor", "seconds"}. Raises InvalidRequestError."""
    if asked is None:
        return MAX_LIFETIME_S
    anchor, seconds = asked.get("anchor"), asked.get("seconds")
    if anchor != "created_at" or set(asked) != {"anchor", "seconds"}:
        raise InvalidRequestError(f"{name} has the anchor created_at, and seconds", param=name)
    if type(seconds) is not int or not MIN_LIFETIME_S <= seconds <= MAX_LIFETIME_S:
        raise InvalidRequestError(
            f"{name}.seconds must be from {MIN_LIFETIME_S} to {MAX_LIFETIME_S}, not {str(seconds)[:20]}", param=name
        )
    return seconds
