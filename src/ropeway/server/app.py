"""The routes, and what stands before them: API key, body limit, errors in OpenAI's shape. Knows no sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ropeway._version import __version__
from ropeway.errors import InvalidRequestError, RopewayError
from ropeway.llm import AsyncLLM
from ropeway.server.access import AccessGuard, caller_of
from ropeway.server.config import ServerConfig
from ropeway.server.errors import (
    JSON,
    BodyTooLargeError,
    anthropic_error_json,
    error_json,
    error_response,
    is_anthropic,
)
from ropeway.server.exposition import Exposition
from ropeway.server.formats import ChatFormat, CompletionFormat, Format
from ropeway.server.health_watch import HealthWatch
from ropeway.server.openai import (
    Generation,
    check_served,
    event_writer,
    start_chat,
    start_completion,
    whole_answer,
)
from ropeway.server.openapi import openapi_document
from ropeway.server.protocol import (
    REFUSED_CHAT_FIELDS,
    REFUSED_COMPLETION_FIELDS,
    ChatBody,
    CompletionBody,
    SamplingBody,
    parse_body,
)
from ropeway.server.request_book import RequestBook
from ropeway.server.sse import EventStreamResponse, closed_on_disconnect
from ropeway.server.tenants import KeyRing

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
DRAIN_RATIO = 8


def create_app(llm: AsyncLLM, config: ServerConfig, keys: KeyRing) -> Starlette:
    """The ASGI application. Its lifespan starts the engine and shuts it down."""

    book = RequestBook(llm.engine)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        llm.start()
        watching = asyncio.create_task(HealthWatch(llm.engine, config.stall_s).run())
        yield
        watching.cancel()
        await llm.shutdown(0.0)

    app = Starlette(
        routes=[*_generation_routes(llm, config, book), *_model_routes(llm), *_operation_routes(llm, config)],
        exception_handlers={
            RopewayError: _on_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_error,
        },
        lifespan=lifespan,
    )
    app.add_middleware(AccessGuard, keys=keys)
    return app


def _generation_routes(llm: AsyncLLM, config: ServerConfig, book: RequestBook) -> list[Route]:
    async def completions(request: Request) -> Response:
        fields = await read_json(request, config.max_body_bytes)
        body = parse_body(CompletionBody, fields, REFUSED_COMPLETION_FIELDS)
        generation = await start_completion(llm, body, caller_of(request))
        return await _answer(request, book, body, generation, CompletionFormat(llm.builder.tokenizer))

    async def chat_completions(request: Request) -> Response:
        fields = await read_json(request, config.max_body_bytes)
        body = parse_body(ChatBody, fields, REFUSED_CHAT_FIELDS)
        generation = await start_chat(llm, body, caller_of(request))
        return await _answer(request, book, body, generation, ChatFormat(llm.builder.tokenizer))

    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    ]


def _model_routes(llm: AsyncLLM) -> list[Route]:
    created = int(time.time())

    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "ropeway",
            "root": llm.facts.served_model_names[0],
            "parent": None,
            "max_model_len": llm.facts.max_model_len,
        }

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [card(name) for name in llm.facts.served_model_names]})

    async def model(request: Request) -> Response:
        model_id = request.path_params["model_id"]
        check_served(model_id, llm.facts.served_model_names)
        return _json(card(model_id))

    return [Route("/v1/models", models), Route("/v1/models/{model_id:path}", model)]


def _operation_routes(llm: AsyncLLM, config: ServerConfig) -> list[Route]:
    exposition = Exposition(llm)

    async def health(request: Request) -> Response:
        llm.engine.check_health(config.stall_s)
        return _json({"status": "ok"})

    async def version(request: Request) -> Response:
        return _json({"version": __version__})

    async def metrics(request: Request) -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE_LATEST)

    async def schema(request: Request) -> Response:
        return _json(openapi_document())

    return [
        Route("/health", health),
        Route("/ping", health),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/openapi.json", schema),
    ]


async def _answer(
    request: Request, book: RequestBook, body: SamplingBody, generation: Generation, form: Format
) -> Response:
    stream = book.submit(generation.answer_id, generation.requests, caller_of(request))
    if body.stream:
        try:
            await stream.wait_accepted()  # a refusal can still have a status of its own
        except RopewayError:
            stream.close()
            raise
        return EventStreamResponse(stream, event_writer(generation, form))
    async with closed_on_disconnect(request.receive, stream):
        answer = await whole_answer(generation, stream, form)
        # A client that has left reads nothing; the status is for the log.
        status = 200 if stream.is_finished else CLIENT_CLOSED_REQUEST
        return Response(answer, status_code=status, media_type=JSON)


async def read_json(request: Request, max_bytes: int) -> object:
    """The decoded body. Raises BodyTooLargeError where it is longer than max_bytes, InvalidRequestError if not JSON.

    Nothing beyond max_bytes is kept. What is only somewhat too large is read to its end all the same: a client that
    is cut off while it sends sees a broken connection instead of the answer.
    """
    too_large = BodyTooLargeError(f"the body is larger than the {max_bytes} bytes that this server reads")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > DRAIN_RATIO * max_bytes:
        raise too_large
    body, num_bytes = bytearray(), 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            body += chunk
        elif num_bytes > DRAIN_RATIO * max_bytes:
            break
    if num_bytes > max_bytes:
        raise too_large
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON in UTF-8: {error}") from None


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    if is_anthropic(request.url.path):
        body = anthropic_error_json(error.status_code, message)
    else:
        body = error_json(message, "invalid_request_error", None, code)
    return Response(body, status_code=error.status_code, media_type=JSON, headers=error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)
