"""OpenAI's responses: create, retrieve, cancel and delete. Knows no text."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ropeway.errors import InvalidRequestError, RopewayError
from ropeway.llm import AsyncLLM
from ropeway.server.access import caller_of
from ropeway.server.answering import AnswerSender
from ropeway.server.config import ServerConfig
from ropeway.server.conversation import ChatMessage
from ropeway.server.errors import json_response
from ropeway.server.openai import start_chat
from ropeway.server.protocol import parse_body
from ropeway.server.reading import read_json
from ropeway.server.request_book import RequestBook
from ropeway.server.request_ids import request_id_of
from ropeway.server.response_store import ResponseStore
from ropeway.server.responses import LiveResponse
from ropeway.server.responses_body import INERT_RESPONSES_FIELDS, REFUSED_RESPONSES_FIELDS, ResponsesBody
from ropeway.server.tenants import Caller

logger = logging.getLogger(__name__)


def response_routes(llm: AsyncLLM, config: ServerConfig, book: RequestBook, sender: AnswerSender) -> list[Route]:
    """The routes under /v1/responses."""
    service = _Responses(llm, config, book, sender)
    return [
        Route("/v1/responses", service.create, methods=["POST"]),
        Route("/v1/responses/{response_id}", service.retrieve, methods=["GET"]),
        Route("/v1/responses/{response_id}", service.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", service.cancel, methods=["POST"]),
    ]


class _Responses:
    def __init__(self, llm: AsyncLLM, config: ServerConfig, book: RequestBook, sender: AnswerSender) -> None:
        self._llm = llm
        self._max_body_bytes = config.max_body_bytes
        self._book = book
        self._sender = sender
        self._store = ResponseStore()
        self._background: set[asyncio.Task[None]] = set()

    async def create(self, request: Request) -> Response:
        fields = await read_json(request, self._max_body_bytes)
        body = parse_body(ResponsesBody, fields, REFUSED_RESPONSES_FIELDS, INERT_RESPONSES_FIELDS)
        caller = caller_of(request)
        conversation = [*self._previous(body, caller), *body.messages()]
        generation = await start_chat(self._llm, body.chat_body(conversation), caller, id_prefix="resp_")
        response_id = generation.answer_id
        live = LiveResponse(generation, body, lambda: self._store.on_ended(response_id))
        if not body.background:
            if body.is_stored:
                self._store.put(response_id, live, conversation, caller)
            try:
                return await self._sender.send(request, generation, live, is_streamed=bool(body.stream))
            except BaseException:
                self._store.discard(response_id)  # its id was never told
                raise
        stream = self._book.submit(response_id, generation.requests, caller, request_id_of(request))
        await stream.wait_accepted()
        self._store.put(response_id, live, conversation, caller)

        async def compute() -> None:
            try:
                await live.whole(stream)
            except RopewayError as error:  # it is in the response too
                logger.warning("response %s failed: %s", response_id, error)

        task = asyncio.create_task(compute())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return json_response(live.object())

    async def retrieve(self, request: Request) -> Response:
        stored = self._store.find(request.path_params["response_id"], caller_of(request))
        return json_response(stored.live.object())

    async def delete(self, request: Request) -> Response:
        response_id, caller = request.path_params["response_id"], caller_of(request)
        self._store.find(response_id, caller)
        self._book.abort([response_id], caller)
        self._store.delete(response_id, caller)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        response_id, caller = request.path_params["response_id"], caller_of(request)
        stored = self._store.find(response_id, caller)
        if stored.live.is_over and stored.live.status != "cancelled":
            raise InvalidRequestError(f"the response has ended already: its status is {stored.live.status}")
        self._book.abort([response_id], caller)
        stored.live.end("cancelled")
        return json_response(stored.live.object())

    def _previous(self, body: ResponsesBody, caller: Caller) -> list[ChatMessage]:
        if body.previous_response_id is None:
            return []
        stored = self._store.find(body.previous_response_id, caller)
        if stored.live.status not in ("completed", "incomplete"):
            raise InvalidRequestError(
                f"previous_response_id names a response that is {stored.live.status}: only one that has ended with an "
                "answer can be gone on from",
                param="previous_response_id",
            )
        return stored.continued()
