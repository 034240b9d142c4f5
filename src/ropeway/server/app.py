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
from ropeway.server.answering import AnswerSender
from ropeway.server.batch_routes import batch_routes
from ropeway.server.batch_service import BatchService
from ropeway.server.body_deadline import BodyDeadline
from ropeway.server.config import ServerConfig
from ropeway.server.endpoints import start_chat_completions, start_completions
from ropeway.server.errors import JSON, anthropic_error_json, error_json, error_response, is_anthropic, json_response
from ropeway.server.failures import FailureGuard
from ropeway.server.file_routes import file_routes
from ropeway.server.health_watch import HealthWatch
from ropeway.server.messages import MessageAnswer
from ropeway.server.messages_body import (
    INERT_MESSAGES_FIELDS,
    REFUSED_MESSAGES_FIELDS,
    CountTokensBody,
    MessagesBody,
)
from ropeway.server.openai import check_served, encode_chat, start_chat
from ropeway.server.operations import health_routes, operation_routes
from ropeway.server.protocol import parse_body
from ropeway.server.reading import read_json
from ropeway.server.request_book import RequestBook
from ropeway.server.request_ids import RequestIds
from ropeway.server.response_routes import response_routes
from ropeway.server.sse import StreamLimits
from ropeway.server.tenants import KeyRing
from ropeway.server.token_routes import token_routes
from ropeway.server.tracing import RequestTraces
from ropeway.server.traffic import CLIENT_CLOSED_REQUEST, Traffic

logger = logging.getLogger(__name__)

QUIET_S = 1.0  # after the start, so that whoever waited for it is served first


def create_app(
    llm: AsyncLLM, config: ServerConfig, keys: KeyRing, traffic: Traffic, traces: RequestTraces | None = None
) -> Starlette:
    """The ASGI application. Its lifespan starts the engine and shuts it down; `state.batches` is its batch service."""

    book = RequestBook(llm.engine, listener=traces)
    batches = BatchService(llm, config, keys)
    sender = AnswerSender(book, StreamLimits(ping_s=config.ping_s, max_unread_bytes=config.max_unread_bytes))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        llm.start()
        await batches.start()
        watching = asyncio.create_task(HealthWatch(llm.engine, config.stall_s).run())
        preparing = asyncio.create_task(_prepare_grammars(llm))
        yield
        watching.cancel()
        preparing.cancel()
        await batches.close()
        await llm.shutdown(0.0)

    app = Starlette(
        routes=[
            *_generation_routes(llm, config, sender),
            *response_routes(llm, config, book, sender),
            *file_routes(batches, config),
            *batch_routes(batches, config, llm.facts.served_model_names[0]),
            *_model_routes(llm),
            *token_routes(llm, config),
            *health_routes(llm, config),
            *operation_routes(llm, config, book, traffic),
        ],
        exception_handlers={
            RopewayError: _on_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
        },
        lifespan=lifespan,
    )
    app.state.batches = batches
    traffic.routes = frozenset(route.path for route in app.routes if isinstance(route, Route))
    # From the inside out: what is added last stands first.
    app.add_middleware(AccessGuard, keys=keys)
    app.add_middleware(BodyDeadline, timeout_s=config.body_timeout_s, traffic=traffic)
    app.add_middleware(FailureGuard)
    if config.cors is not None:
        app.add_middleware(config.cors.wrap)
    if traces is not None:
        app.add_middleware(traces.wrap)
    app.add_middleware(RequestIds, has_access_log=config.has_access_log, traffic=traffic)
    return app


async def _prepare_grammars(llm: AsyncLLM) -> None:
    """Reads the vocabulary for grammars in the first quiet second.

    It takes a third of a second, half of it with the interpreter lock held: in service every stream would stand still.
    """
    while True:
        await asyncio.sleep(QUIET_S)
        if llm.engine.is_idle():
            await asyncio.to_thread(llm.builder.grammars.prepare)
            return


def _generation_routes(llm: AsyncLLM, config: ServerConfig, sender: AnswerSender) -> list[Route]:
    async def completions(request: Request) -> Response:
        fields = await read_json(request, config.max_body_bytes)
        started = await start_completions(llm, fields, caller_of(request))
        return await sender.send(request, started.generation, started.answer, is_streamed=started.is_streamed)

    async def chat_completions(request: Request) -> Response:
        fields = await read_json(request, config.max_body_bytes)
        started = await start_chat_completions(llm, fields, caller_of(request))
        return await sender.send(request, started.generation, started.answer, is_streamed=started.is_streamed)

    async def messages(request: Request) -> Response:
        fields = await read_json(request, config.max_body_bytes)
        body = parse_body(MessagesBody, fields, REFUSED_MESSAGES_FIELDS, INERT_MESSAGES_FIELDS)
        generation = await start_chat(llm, body.chat_body(), caller_of(request), id_prefix="msg_")
        return await sender.send(request, generation, MessageAnswer(generation), is_streamed=bool(body.stream))

    async def count_tokens(request: Request) -> Response:
        fields = await read_json(request, config.max_body_bytes)
        body = parse_body(CountTokensBody, fields, REFUSED_MESSAGES_FIELDS, INERT_MESSAGES_FIELDS)
        encoded = await encode_chat(llm, body.chat_body())
        return json_response({"input_tokens": len(encoded.token_ids)})

    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
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
