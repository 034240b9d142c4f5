"""The routes for operating a server, and for looking after requests. Knows no text and no sockets."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ropeway._version import __version__
from ropeway.errors import InvalidRequestError
from ropeway.llm import AsyncLLM
from ropeway.server.access import caller_of
from ropeway.server.bodies import AbortBody
from ropeway.server.config import ServerConfig
from ropeway.server.errors import json_response
from ropeway.server.exposition import Exposition
from ropeway.server.openapi import openapi_document
from ropeway.server.page import page_of
from ropeway.server.protocol import parse_body
from ropeway.server.reading import read_json
from ropeway.server.request_book import AnswerStatus, RequestBook
from ropeway.server.traffic import Traffic


def health_routes(llm: AsyncLLM, config: ServerConfig) -> list[Route]:
    """Whether it lives, whether it takes requests, and what it is."""

    async def health(request: Request) -> Response:
        llm.engine.check_health(config.stall_s)
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        llm.engine.check_ready(config.stall_s)
        return json_response({"status": "ready"})

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def schema(request: Request) -> Response:
        return json_response(openapi_document())

    async def docs(request: Request) -> Response:
        return HTMLResponse(page_of(openapi_document()))

    return [
        Route("/health", health),
        Route("/ping", health),
        Route("/ready", ready),
        Route("/version", version),
        Route("/openapi.json", schema),
        Route("/docs", docs),
    ]


def operation_routes(llm: AsyncLLM, config: ServerConfig, book: RequestBook, traffic: Traffic) -> list[Route]:
    """What the admin may do, and what callers are told of their own requests."""
    exposition = Exposition(llm, traffic)

    async def metrics(request: Request) -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE_LATEST)

    async def pause(request: Request) -> Response:
        llm.engine.pause()
        return json_response({"status": "paused"})

    async def resume(request: Request) -> Response:
        llm.engine.resume()
        return json_response({"status": "resumed"})

    async def abort_requests(request: Request) -> Response:
        body = parse_body(AbortBody, await read_json(request, config.max_body_bytes), {}, ())
        if bool(body.abort_all) == (body.request_ids is not None):
            raise InvalidRequestError("give either request_ids or abort_all", param="request_ids")
        names = [body.request_ids] if isinstance(body.request_ids, str) else body.request_ids
        aborted = book.abort_all() if names is None else book.abort(names, caller_of(request))
        return json_response({"aborted": aborted})

    async def request_status(request: Request) -> Response:
        return json_response(_written(await book.status(request.path_params["request_id"], caller_of(request))))

    return [
        Route("/metrics", metrics),
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/abort_requests", abort_requests, methods=["POST"]),
        Route("/v1/requests/{request_id}", request_status),
    ]


def _written(status: AnswerStatus) -> dict[str, object]:
    return {
        "id": status.answer_id,
        "object": "request",
        "created": int(status.created_s),
        "state": status.state,
        "waiting_reason": status.waiting_reason,
        "finish_reasons": status.finish_reasons,
        "error": status.error,
        "usage": {
            "prompt_tokens": status.num_prompt_tokens,
            "completion_tokens": status.num_generated_tokens,
            "total_tokens": status.num_prompt_tokens + status.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": status.num_cached_tokens},
        },
    }
