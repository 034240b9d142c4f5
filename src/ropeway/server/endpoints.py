"""From the JSON of a body to what is to be computed and how it is answered, by the path. Knows no sockets.

Requests over HTTP and the lines of batches begin here alike, so both are checked alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.llm import AsyncLLM
from ropeway.server.answering import Answer
from ropeway.server.formats import ChatFormat, CompletionFormat
from ropeway.server.openai import CompletionAnswer, Generation, start_chat, start_completion
from ropeway.server.protocol import (
    REFUSED_CHAT_FIELDS,
    REFUSED_COMPLETION_FIELDS,
    ChatBody,
    CompletionBody,
    parse_body,
)
from ropeway.server.tenants import Caller


@dataclass(frozen=True, slots=True)
class Started:
    """A body that is right: its requests, and what turns their deltas into an answer."""

    generation: Generation
    answer: Answer
    is_streamed: bool


async def start_completions(llm: AsyncLLM, fields: object, caller: Caller) -> Started:
    """POST /v1/completions. Raises InvalidRequestError, UnknownModelError, OverloadedError."""
    body = parse_body(CompletionBody, fields, REFUSED_COMPLETION_FIELDS)
    generation = await start_completion(llm, body, caller)
    answer = CompletionAnswer(generation, CompletionFormat(llm.builder.tokenizer))
    return Started(generation, answer, bool(body.stream))


async def start_chat_completions(llm: AsyncLLM, fields: object, caller: Caller) -> Started:
    """POST /v1/chat/completions. Raises InvalidRequestError, UnknownModelError, OverloadedError."""
    body = parse_body(ChatBody, fields, REFUSED_CHAT_FIELDS)
    generation = await start_chat(llm, body, caller)
    answer = CompletionAnswer(generation, ChatFormat(llm.builder.tokenizer))
    return Started(generation, answer, bool(body.stream))
