"""The application: its routes, what stands before them, and how errors are answered. Knows no sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ropeway.errors import RopewayError
from ropeway.llm import AsyncLLM
from ropeway.server.access import AccessGuard, caller_of
from ropeway.server.config import ServerConfig
from ropeway.server.errors import JSON, anthropic_error_json, error_json, error_response, is_anthropic, json_response
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
from ropeway.server.operations import health_routes, operation_routes
from ropeway.server.protocol import (
    REFUSED_CHAT_FIELDS,
    REFUSED_COMPLETION_FIELDS,
    ChatBody,
    CompletionBody,
    SamplingBody,
    parse_body,
)
from ropeway.server.reading import read_json
from ropeway.server.request_book import RequestBook
from ropeway.server.request_ids import ANSWER_ID, RequestIds, request_id_of
from ropeway.server.sse import EventStreamResponse, closed_on_disconnect
from ropeway.server.tenants import KeyRing
from ropeway.server.token_routes import token_routes

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499


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
        routes=[
            *_generation_routes(llm, config, book),
            *_model_routes(llm),
            *token_routes(llm, config),
            *health_routes(llm, config),
            *operation_routes(llm, config, book),
        ],
        exception_handlers={
            RopewayError: _on_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_error,
        },
        lifespan=lifespan,
    )
    app.add_middleware(AccessGuard, keys=keys)
    app.add_middleware(RequestIds, has_access_log=config.has_access_log)  # added last, so around the guard
    return app


def _generation_routes(llm: AsyncLLM, config: ServerConfig, book: RequestBook) -> list[Route]:
    async def completions(request: Request) -> Response:
        fields = await read_json(request, config.max_body_bytes)
        body = parse_body(CompletionBody, fields, REFUSED_COMPLETION_FIELDS)
        generation = await start_completion(llm, body, caller_of(request))
        return await _answer(request, book, config.ping_s, body, generation, CompletionFormat(llm.builder.tokenizer))

    async def chat_completions(request: Request) -> Response:
        fields = await read_json(request, config.max_body_bytes)
        body = parse_body(ChatBody, fields, REFUSED_CHAT_FIELDS)
        generation = await start_chat(llm, body, caller_of(request))
        return await _answer(request, book, config.ping_s, body, generation, ChatFormat(llm.builder.tokenizer))

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
        return json_response({"object": "list", "data": [card(name) for name in llm.facts.served_model_names]})

    async def model(request: Request) -> Response:
        model_id = request.path_params["model_id"]
        check_served(model_id, llm.facts.served_model_names)
        return json_response(card(model_id))

    return [Route("/v1/models", models), Route("/v1/models/{model_id:path}", model)]


async def _answer(
    request: Request, book: RequestBook, ping_s: float, body: SamplingBody, generation: Generation, form: Format
) -> Response:
    stream = book.submit(generation.answer_id, generation.requests, caller_of(request), request_id_of(request))
    request.scope[ANSWER_ID] = generation.answer_id
    if body.stream:
        try:
            await stream.wait_accepted()  # a refusal can still have a status of its own
        except RopewayError:
            stream.close()
            raise
        return EventStreamResponse(stream, event_writer(generation, form), ping_s=ping_s)
    async with closed_on_disconnect(request.receive, stream):
        answer = await whole_answer(generation, stream, form)
        # A client that has left reads nothing; the status is for the log.
        status = 200 if stream.is_finished else CLIENT_CLOSED_REQUEST
        return Response(answer, status_code=status, media_type=JSON)


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
