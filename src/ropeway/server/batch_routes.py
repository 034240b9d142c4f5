"""OpenAI's batches: create, list, retrieve, cancel. Knows no engine."""

from __future__ import annotations

import secrets

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ropeway.batch.journal import Journal
from ropeway.batch.records import BatchRecord
from ropeway.errors import InvalidRequestError, OverloadedError
from ropeway.server.access import caller_of
from ropeway.server.batch_answers import BATCH_ENDPOINTS
from ropeway.server.batch_service import BatchService
from ropeway.server.bodies import BatchBody
from ropeway.server.config import ServerConfig
from ropeway.server.errors import UnknownRequestError, json_response
from ropeway.server.file_routes import lifetime_of, list_object, page_of, seen_by, visible_file
from ropeway.server.protocol import parse_body
from ropeway.server.reading import read_json
from ropeway.server.tenants import Caller

WINDOW_S = {"24h": 24 * 3600}
MAX_OPEN_BATCHES = 100  # of one tenant
DEFAULT_BATCH_PAGE, MAX_BATCH_PAGE = 20, 100
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def batch_routes(service: BatchService, config: ServerConfig, model: str) -> list[Route]:
    """The routes under /v1/batches. model: what is served here."""
    batches = _Batches(service, config, model)
    return [
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.list, methods=["GET"]),
        Route("/v1/batches/{batch_id}", batches.retrieve, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
    ]


class _Batches:
    def __init__(self, service: BatchService, config: ServerConfig, model: str) -> None:
        self._service = service
        self._max_body_bytes = config.max_body_bytes
        self._model = model

    async def create(self, request: Request) -> Response:
        body = parse_body(BatchBody, await read_json(request, self._max_body_bytes), {}, ())
        output_lifetime_s = _checked(body)
        store, caller, now_s = await self._service.store(), caller_of(request), int(self._service.clock())

        def create(journal: Journal) -> BatchRecord:
            file = visible_file(journal.file(body.input_file_id), body.input_file_id, caller)
            if file.purpose != "batch":
                raise InvalidRequestError(
                    f"the input file has the purpose {file.purpose}; it must be batch", param="input_file_id"
                )
            if len(journal.open_batches(caller.tenant)) >= MAX_OPEN_BATCHES:
                raise OverloadedError(f"{MAX_OPEN_BATCHES} batches are open already; wait for one, or cancel one")
            return journal.add_batch(
                BatchRecord(
                    batch_id=f"batch_{secrets.token_hex(16)}",
                    tenant=caller.tenant,
                    input_file_id=file.file_id,
                    endpoint=body.endpoint,
                    model=self._model,
                    metadata=orjson.dumps(body.metadata).decode(),
                    status="validating",
                    created_s=now_s,
                    expires_s=now_s + WINDOW_S[body.completion_window],
                    output_lifetime_s=output_lifetime_s,
                )
            )

        record = await store.journal.run(create)
        store.runner.add(record)
        return json_response(batch_object(record))

    async def list(self, request: Request) -> Response:
        store, caller = await self._service.store(), caller_of(request)
        page = page_of(request.query_params, default_limit=DEFAULT_BATCH_PAGE, max_limit=MAX_BATCH_PAGE)
        records = await store.journal.run(lambda journal: journal.batches(seen_by(caller), page.with_one_more))
        return json_response(list_object([batch_object(each) for each in records], page.limit))

    async def retrieve(self, request: Request) -> Response:
        store, batch_id, caller = await self._service.store(), request.path_params["batch_id"], caller_of(request)
        record = await store.journal.run(lambda journal: _visible(journal.batch(batch_id), batch_id, caller))
        return json_response(batch_object(record))

    async def cancel(self, request: Request) -> Response:
        store, batch_id, caller = await self._service.store(), request.path_params["batch_id"], caller_of(request)
        now_s = int(self._service.clock())

        def cancel(journal: Journal) -> BatchRecord:
            record = _visible(journal.batch(batch_id), batch_id, caller)
            if record.status == "cancelling":
                return record
            if record.status not in ("validating", "in_progress"):
                raise InvalidRequestError(f"the batch is {record.status}: there is nothing left to cancel")
            return journal.set_status(batch_id, "cancelling", now_s)

        record = await store.journal.run(cancel)
        store.runner.cancel(record)
        return json_response(batch_object(record))


def batch_object(record: BatchRecord) -> dict[str, object]:
    """As OpenAI spells it."""
    faults = orjson.loads(record.faults)
    return {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": record.input_file_id,
        "completion_window": "24h",
        "status": record.status,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_s,
        "expires_at": record.expires_s,
        **{f"{name}_at": getattr(record, f"{name}_s") for name in _TIMES},
        "request_counts": {
            "total": record.num_lines,
            "completed": record.num_completed,
            "failed": record.num_failed,
        },
        "usage": {
            "input_tokens": record.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.num_cached_tokens},
            "output_tokens": record.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": record.num_prompt_tokens + record.num_output_tokens,
        },
        "metadata": orjson.loads(record.metadata),
    }


def _visible(record: BatchRecord | None, batch_id: str, caller: Caller) -> BatchRecord:
    if record is None or not caller.may_see(record.tenant):
        raise UnknownRequestError(f"no batch {batch_id[:100]!r} is known")
    return record


def _checked(body: BatchBody) -> int:
    """The lifetime of its output. Raises InvalidRequestError for what no batch can be."""
    if body.endpoint not in BATCH_ENDPOINTS:
        raise InvalidRequestError(
            f"endpoint must be one of {', '.join(BATCH_ENDPOINTS)}, not {body.endpoint[:60]!r}", param="endpoint"
        )
    if body.completion_window not in WINDOW_S:
        raise InvalidRequestError(
            f"completion_window must be 24h, not {body.completion_window[:20]!r}", param="completion_window"
        )
    metadata = body.metadata or {}
    is_long = any(len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in metadata.items())
    if len(metadata) > MAX_METADATA or is_long:
        raise InvalidRequestError(
            f"metadata has at most {MAX_METADATA} entries, keys of {MAX_METADATA_KEY} characters and values of "
            f"{MAX_METADATA_VALUE}",
            param="metadata",
        )
    return lifetime_of(body.output_expires_after, "output_expires_after")
