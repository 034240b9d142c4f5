"""Answers the lines of batches: the same bodies, checks and answers as over HTTP. Knows no journal and no sockets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from ropeway.batch.records import LineAnswer
from ropeway.core.params import Request
from ropeway.errors import EngineStoppedError, InvalidRequestError, OverloadedError, RopewayError
from ropeway.llm import AsyncLLM
from ropeway.server.endpoints import Started, start_chat_completions, start_completions
from ropeway.server.errors import error_body
from ropeway.server.openai import start_chat
from ropeway.server.protocol import parse_body
from ropeway.server.responses import LiveResponse
from ropeway.server.responses_body import INERT_RESPONSES_FIELDS, REFUSED_RESPONSES_FIELDS, ResponsesBody
from ropeway.server.tenants import Caller


class TryAgainError(RopewayError):
    """A line has no answer, through no fault of its own: it stays pending. has_run: it was being computed."""

    def __init__(self, message: str, *, has_run: bool) -> None:
        super().__init__(message)
        self.has_run = has_run


async def answer_line(llm: AsyncLLM, data: bytes, seed: int, caller: Caller) -> LineAnswer:
    """Answers one line, in the background class. data: the line as it is in the input. seed: of its random numbers,
    where its body gives none.

    Raises TryAgainError. Cancelling it aborts what it computes.
    """
    line = orjson.loads(data)
    fields, start = line["body"], _STARTS.get(line["url"])
    try:
        if start is None:
            raise InvalidRequestError(f"url must be one of {', '.join(_STARTS)}, not {line['url'][:60]!r}", param="url")
        started = await start(llm, fields, caller)
        if started.is_streamed:
            raise InvalidRequestError("stream is not for batches: a line has one answer; leave it out", param="stream")
    except OverloadedError as error:
        raise TryAgainError(str(error), has_run=False) from None
    except RopewayError as error:
        return error_answer(error)
    generation = started.generation
    draws_seeds = fields.get("seed") is None
    requests = [
        _in_background(request, seed, number if draws_seeds else None)
        for number, request in enumerate(generation.requests)
    ]
    try:
        stream = llm.submit(requests)
    except EngineStoppedError as error:
        raise TryAgainError(str(error), has_run=False) from None
    async with stream:
        try:
            body = await started.answer.whole(stream)
        except EngineStoppedError as error:
            raise TryAgainError(str(error), has_run=True) from None
        except OverloadedError as error:
            if fields.get("queue_timeout") is None:
                raise TryAgainError(str(error), has_run=False) from None
            return error_answer(error, generation.answer_id)  # the line itself would wait no longer
        except RopewayError as error:
            return error_answer(error, generation.answer_id)
    return _answered(generation.answer_id, body)


def error_answer(error: Exception, request_id: str = "") -> LineAnswer:
    """The answer of a line that ends with an error: the status and JSON that it would get over HTTP."""
    status, body = error_body(error)
    return LineAnswer(status_code=status, request_id=request_id, body=body)


async def _start_response(llm: AsyncLLM, fields: object, caller: Caller) -> Started:
    """POST /v1/responses, of which nothing is stored."""
    body = parse_body(ResponsesBody, fields, REFUSED_RESPONSES_FIELDS, INERT_RESPONSES_FIELDS)
    for name in ("background", "previous_response_id"):
        if getattr(body, name):
            raise InvalidRequestError(f"{name} is not for batches; leave it out", param=name)
    body = body.model_copy(update={"store": False})
    generation = await start_chat(llm, body.chat_body(body.messages()), caller, id_prefix="resp_")
    return Started(generation, LiveResponse(generation, body, lambda: None), bool(body.stream))


_STARTS = {
    "/v1/chat/completions": start_chat_completions,
    "/v1/completions": start_completions,
    "/v1/responses": _start_response,
}
BATCH_ENDPOINTS = tuple(_STARTS)


def _in_background(request: Request, seed: int, number: int | None) -> Request:
    """The request as a batch runs it; with the line's seed if it is the first of the line, one made of it if it is
    another, and its own where number is None.
    """
    terms = replace(request.terms, is_background=True)
    if number is None:
        return replace(request, terms=terms)
    if number:
        seed = int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:8])
    return replace(request, terms=terms, seed=seed)


def _answered(request_id: str, body: bytes) -> LineAnswer:
    answer = orjson.loads(body)
    is_response = answer["object"] == "response"
    if _is_aborted(answer):
        raise TryAgainError("it was aborted", has_run=False)
    usage = answer["usage"]
    prompt, output = ("input", "output") if is_response else ("prompt", "completion")
    return LineAnswer(
        status_code=200,
        request_id=request_id,
        body=body,
        num_prompt_tokens=usage[f"{prompt}_tokens"],
        num_cached_tokens=usage[f"{prompt}_tokens_details"]["cached_tokens"],
        num_output_tokens=usage[f"{output}_tokens"],
    )


def _is_aborted(answer: Mapping[str, Any]) -> bool:
    if answer["object"] == "response":
        return bool(answer["status"] == "cancelled")
    return any(choice["finish_reason"] == "abort" for choice in answer["choices"])
