"""From a generation to its answer over HTTP, whole or streamed, whoever's format it has. Knows no formats."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from ropeway.engine.output_stream import OutputStream
from ropeway.server.access import caller_of
from ropeway.server.errors import JSON
from ropeway.server.openai import Generation
from ropeway.server.request_book import RequestBook
from ropeway.server.request_ids import ANSWER_ID, request_id_of
from ropeway.server.sse import EventStreamResponse, EventWriter, StreamLimits, closed_on_disconnect
from ropeway.server.traffic import CLIENT_CLOSED_REQUEST


class Answer(Protocol):
    """What is made of an engine's output: one way for streams, one for whole answers."""

    def writer(self) -> EventWriter: ...

    async def whole(self, stream: OutputStream) -> bytes: ...


class AnswerSender:
    """Hands generations to the engine and sends what comes of them."""

    def __init__(self, book: RequestBook, limits: StreamLimits) -> None:
        self._book = book
        self._limits = limits

    async def send(self, request: Request, generation: Generation, answer: Answer, *, is_streamed: bool) -> Response:
        """The response. Raises what the engine refuses the requests with."""
        caller, client_id = caller_of(request), request_id_of(request)
        stream = self._book.submit(generation.answer_id, generation.requests, caller, client_id)
        request.scope[ANSWER_ID] = generation.answer_id
        if is_streamed:
            try:
                await stream.wait_accepted()  # a refusal can still have a status of its own
            except BaseException:
                stream.close()
                raise
            return EventStreamResponse(stream, answer.writer(), self._limits)
        async with closed_on_disconnect(request.receive, stream):
            body = await answer.whole(stream)
            # A client that has left reads nothing; the status is for the log.
            status = 200 if stream.is_finished else CLIENT_CLOSED_REQUEST
            return Response(body, status_code=status, media_type=JSON)
