"""OpenAI's completions and chat completions: from a validated body to requests, from deltas to JSON and events.

Knows no routes and no sockets. Choices are numbered prompt by prompt: choice = prompt number x n + sequence index.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

from ropeway.core.params import Request
from ropeway.engine.output_stream import OutputStream
from ropeway.errors import EngineStoppedError, InvalidRequestError, RopewayError, UnknownModelError
from ropeway.inputs import EncodedPrompt
from ropeway.llm import AsyncLLM
from ropeway.outputs import Delta
from ropeway.server.choices import AnswerShape, ChoiceNews, RequestChoices, Wishes
from ropeway.server.errors import error_body
from ropeway.server.formats import Format
from ropeway.server.protocol import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody, SamplingBody
from ropeway.server.tenants import Caller
from ropeway.server.tools import ToolUse
from ropeway.text.reasoning import OPENER
from ropeway.text.tokenizer import Tokenizer
from ropeway.text.tool_prompts import tools_grammar

T = TypeVar("T")

MAX_CHOICES = 2048
# Tokenizing this much takes about a millisecond; more goes to a thread, so that streams do not stutter.
INLINE_PROMPT_CHARACTERS = 4096

DONE = b"data: [DONE]\n\n"
_PLAIN_TEXT = AnswerShape()


@dataclass(frozen=True, slots=True)
class Generation:
    """A body turned into requests: what to run, and what the answer is to be called."""

    answer_id: str
    model: str
    created: int
    requests: tuple[Request, ...]
    includes_usage: bool
    wishes: Wishes
    tokenizer: Tokenizer
    repeats_usage: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.requests[0].params.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    def choice_numbers(self) -> dict[tuple[str, int], int]:
        """(request id, sequence index) -> choice."""
        n = self.requests[0].params.n
        return {
            (request.request_id, index): number * n + index
            for number, request in enumerate(self.requests)
            for index in range(n)
        }

    def news_of(self) -> dict[str, RequestChoices]:
        """What turns the deltas of each request into news, by request id."""
        n = self.requests[0].params.n
        return {
            request.request_id: RequestChoices(request, self.wishes, self.tokenizer, number * n)
            for number, request in enumerate(self.requests)
        }


class Usage:
    """The token counts of an answer, added up delta by delta."""

    __slots__ = ("_num_cached_tokens", "num_completion_tokens", "num_prompt_tokens")

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_completion_tokens = 0
        self._num_cached_tokens: dict[str, int] = {}  # by request

    def add(self, delta: Delta) -> None:
        self.num_completion_tokens += len(delta.token_ids)
        # The other sequences of a request find what its first has computed.
        if delta.num_cached_tokens and delta.index == 0:
            known = self._num_cached_tokens.get(delta.request_id, 0)
            self._num_cached_tokens[delta.request_id] = max(known, delta.num_cached_tokens)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._num_cached_tokens.values())

    def fields(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


async def start_completion(llm: AsyncLLM, body: CompletionBody, caller: Caller) -> Generation:
    """Requests for a completions body. Raises InvalidRequestError, UnknownModelError, OverloadedError."""
    model = _served_model(llm, body)
    llm.engine.check_queue()
    prompts = body.prompts()
    _check_num_choices(len(prompts), body)
    encoded = await off_loop_if_long(_num_characters(prompts), lambda: [llm.builder.encode(each) for each in prompts])
    grammar = await _grammar(llm, body)
    max_tokens = body.max_tokens
    if max_tokens is None:
        longest = max(len(prompt.token_ids) for prompt in encoded)
        if body.truncate_prompt_tokens is not None:
            longest = min(longest, max(1, body.truncate_prompt_tokens))  # -1: as much as leaves room
        max_tokens = max(1, min(DEFAULT_COMPLETION_TOKENS, llm.facts.max_model_len - longest))
    answer_id = f"cmpl-{secrets.token_hex(16)}"
    return _generation(llm, body, caller, model, answer_id, encoded, max_tokens, grammar)


async def encode_chat(llm: AsyncLLM, body: ChatBody) -> EncodedPrompt:
    """The prompt of a chat body. Raises InvalidRequestError, UnknownModelError."""
    _served_model(llm, body)
    messages, tools = body.conversation(), body.tool_use().tools
    num_characters = sum(len(str(message["content"])) for message in messages) + len(str(body.tools or ""))
    variables = body.chat_template_kwargs
    return await off_loop_if_long(num_characters, lambda: llm.builder.encode_chat(messages, tools, variables))


async def start_chat(llm: AsyncLLM, body: ChatBody, caller: Caller, id_prefix: str = "chatcmpl-") -> Generation:
    """Requests for a chat body. Raises InvalidRequestError, UnknownModelError, OverloadedError."""
    try:
        return await _start_chat(llm, body, caller, id_prefix)
    except InvalidRequestError as error:
        raise body.as_given(error) from None


async def _start_chat(llm: AsyncLLM, body: ChatBody, caller: Caller, id_prefix: str) -> Generation:
    model = _served_model(llm, body)
    llm.engine.check_queue()
    _check_num_choices(1, body)
    use = body.tool_use()
    encoded = await encode_chat(llm, body)
    grammar = await _grammar(llm, body)
    if use.must_call or (use.tools and grammar is not None):
        grammar = await _tools_grammar(llm, use, grammar)
    shape = _answer_shape(llm, use, encoded, has_grammar=grammar is not None)
    answer_id = f"{id_prefix}{secrets.token_hex(16)}"
    return _generation(llm, body, caller, model, answer_id, [encoded], body.num_tokens_asked, grammar, shape)


class CompletionAnswer:
    """An answer to one of OpenAI's completions."""

    def __init__(self, generation: Generation, form: Format) -> None:
        self._generation = generation
        self._form = form

    def writer(self) -> ChunkWriter:
        return event_writer(self._generation, self._form)

    async def whole(self, stream: OutputStream) -> bytes:
        """The unstreamed answer. Raises EngineStoppedError where a sequence could not be computed."""
        return await whole_answer(self._generation, stream, self._form)


async def whole_answer(generation: Generation, stream: OutputStream, form: Format) -> bytes:
    """The unstreamed answer. Raises EngineStoppedError where a sequence could not be computed."""
    choices = [ChoiceNews(number) for number in range(generation.num_choices)]
    news_of = generation.news_of()
    usage = Usage(generation.num_prompt_tokens)
    for delta in await stream.take_all():
        usage.add(delta)
        for news in news_of[delta.request_id].push(delta):
            choices[news.number].add(news)
    if any(choice.finish_reason == "error" for choice in choices):
        raise computation_error()
    written = [form.choice(choice, generation.wishes) for choice in choices]
    beside = form.beside(choices[0], generation.wishes)
    return orjson.dumps({**_head(generation, form.object_name), "choices": written, "usage": usage.fields(), **beside})


def event_writer(generation: Generation, form: Format) -> ChunkWriter:
    """What writes the streamed answer as server-sent events."""
    return ChunkWriter(generation, form) if generation.wishes.is_text_only else _NewsWriter(generation, form)


class ChunkWriter:
    """Writes chunks by joining bytes: everything but the text and the finish reason is known beforehand."""

    __slots__ = ("_fixed_tail", "_form", "_generation", "_head", "_only_parts", "_parts", "_usage")

    def __init__(self, generation: Generation, form: Format) -> None:
        self._generation = generation
        self._form = form
        self._head = orjson.dumps(_head(generation, form.chunk_name))[:-1] + b',"choices":['
        self._fixed_tail: bytes | None = b'],"usage":null}\n\n' if generation.includes_usage else b"]}\n\n"
        if generation.repeats_usage:
            self._fixed_tail = None
        self._parts = {
            key: (b"data: " + self._head + form.chunk_parts(number)[0], form.chunk_parts(number)[1])
            for key, number in generation.choice_numbers().items()
        }
        # Of an answer of one choice, as most are: nothing has to be looked up.
        self._only_parts = next(iter(self._parts.values())) if len(self._parts) == 1 else None
        self._usage = Usage(generation.num_prompt_tokens)

    ping = b": ping\n\n"

    def first(self) -> bytes:
        """What precedes every text: the role of each chat choice."""
        choices = [self._form.first_choice(number) for number in range(self._generation.num_choices)]
        return b"".join(
            b"data: " + self._head + orjson.dumps(choice) + self._tail() for choice in choices if choice is not None
        )

    def _tail(self) -> bytes:
        """What ends a chunk."""
        if self._fixed_tail is not None:
            return self._fixed_tail
        return b'],"usage":' + orjson.dumps(self._usage.fields()) + b"}\n\n"

    def chunk(self, delta: Delta) -> bytes:
        """The event of one delta; nothing where it shows no text yet. Raises where the sequence could not be
        computed.
        """
        self._usage.add(delta)
        if delta.finish_reason is None and not delta.text:
            return b""
        if delta.finish_reason == "error":
            raise computation_error()
        before, between = self._only_parts or self._parts[delta.request_id, delta.index]
        reason = b"null}" if delta.finish_reason is None else b'"%s"}' % delta.finish_reason.encode()
        return b"".join((before, orjson.dumps(delta.text), between, reason, self._tail()))

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events of some deltas, in order. Raises as `chunk` does."""
        return self.chunk(deltas[0]) if len(deltas) == 1 else b"".join([self.chunk(delta) for delta in deltas])

    def failure(self, error: RopewayError) -> bytes:
        """An error after the start is an event of its own."""
        return _event(error_body(error)[1])

    def last(self) -> bytes:
        if not self._generation.includes_usage:
            return DONE
        usage = orjson.dumps(self._usage.fields())
        return _event(self._head + b'],"usage":' + usage + b"}") + DONE

    def close(self) -> None:
        """Nothing of it outlives its stream."""


class _NewsWriter(ChunkWriter):
    """Writes chunks of answers that hold more than text."""

    __slots__ = ("_news_of",)

    def __init__(self, generation: Generation, form: Format) -> None:
        super().__init__(generation, form)
        self._news_of = generation.news_of()

    def chunk(self, delta: Delta) -> bytes:
        self._usage.add(delta)
        if delta.finish_reason == "error":
            raise computation_error()
        news = self._news_of[delta.request_id].push(delta)
        return b"".join([self._written(each) for each in news if each.is_worth_telling()])

    def _written(self, news: ChoiceNews) -> bytes:
        wishes = self._generation.wishes
        choice, beside = self._form.chunk_choice(news, wishes), self._form.beside(news, wishes)
        more = orjson.dumps(beside)[1:-1] + b"," if beside else b""
        return b"data: {" + more + self._head[1:] + orjson.dumps(choice) + self._tail()


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _head(generation: Generation, object_name: str) -> dict[str, object]:
    return {
        "id": generation.answer_id,
        "object": object_name,
        "created": generation.created,
        "model": generation.model,
    }


def computation_error() -> EngineStoppedError:
    """What is told of a sequence that a step could not compute."""
    return EngineStoppedError("the engine could not compute this request; see the server's log")


def _generation(
    llm: AsyncLLM,
    body: SamplingBody,
    caller: Caller,
    model: str,
    answer_id: str,
    prompts: Sequence[EncodedPrompt],
    max_tokens: int | None,
    grammar: str | None,
    shape: AnswerShape = _PLAIN_TEXT,
) -> Generation:
    params = body.sampling_params(max_tokens, llm.builder.default_sampling, grammar)
    if shape.tool_format is not None and llm.builder.tokenizer.special_id(shape.tool_format.opener or "") is not None:
        params = replace(params, skip_special_tokens=False)  # the token that announces a call must be seen
    terms = replace(body.service_terms(), tenant=caller.tenant, weight=caller.weight)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    encoded = [llm.builder.truncate(prompt, body.truncate_prompt_tokens, max_tokens) for prompt in prompts]
    requests = tuple(
        llm.builder.build(prompt, params, f"{answer_id}-{number}", terms) for number, prompt in enumerate(encoded)
    )
    tokenizer = llm.builder.tokenizer
    echo = {
        request.request_id: prompt.shown(tokenizer, skip_special=params.skip_special_tokens)
        for request, prompt in zip(requests, encoded, strict=True)
        if body.echoes
    }
    wishes = Wishes(
        logprobs=params.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        echo=echo,
        shape=shape,
    )
    return Generation(
        answer_id,
        model,
        int(time.time()),
        requests,
        body.includes_usage,
        wishes,
        tokenizer,
        repeats_usage=body.repeats_usage,
    )


async def _tools_grammar(llm: AsyncLLM, use: ToolUse, answer: str | None) -> str:
    """The grammar of a call that must be made, or may be instead of what the grammar `answer` allows, compiled off the
    loop.
    """
    builder = llm.builder
    tools = use.required or use.tools

    def compiled() -> str:
        grammar = tools_grammar(
            builder.tool_format, tools, builder.tokenizer, is_parallel=use.is_parallel, answer=answer
        )
        try:
            builder.grammars.check(grammar)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"tools: {error}", param="tools") from None
        return grammar

    return await asyncio.to_thread(compiled)


def _answer_shape(llm: AsyncLLM, use: ToolUse, prompt: EncodedPrompt, *, has_grammar: bool) -> AnswerShape:
    """What to look for in an answer: calls where there are tools, reasoning where the model thinks and may say so."""
    starts_thinking = None
    if llm.builder.has_reasoning and not has_grammar:
        starts_thinking = (prompt.text or "").rstrip().endswith(OPENER)
    if not use.tools:
        return AnswerShape(starts_thinking=starts_thinking)
    return AnswerShape(
        llm.builder.tool_format,
        frozenset(tool.name for tool in use.tools),
        is_either=has_grammar and not use.must_call,
        is_parallel=use.is_parallel,
        is_named=use.is_named,
        starts_thinking=starts_thinking,
    )


async def _grammar(llm: AsyncLLM, body: SamplingBody) -> str | None:
    """The grammar of an answer, compiled off the loop (it may take a second), so that building the request finds it."""
    if body.response_format is None and body.structured_outputs is None:
        return None

    def compiled() -> str | None:
        grammar = body.grammar()
        if grammar is not None:
            try:
                llm.builder.grammars.check(grammar)
            except InvalidRequestError as error:
                field = "response_format" if body.structured_outputs is None else "structured_outputs"
                raise InvalidRequestError(f"{field}: {error}", param=field) from None
        return grammar

    return await asyncio.to_thread(compiled)


def _served_model(llm: AsyncLLM, body: SamplingBody) -> str:
    served = llm.facts.served_model_names
    if body.model is None:
        return served[0]
    check_served(body.model, served)
    return body.model


def check_served(name: str, served: Sequence[str]) -> None:
    """Raises UnknownModelError for a name that is not served."""
    if name not in served:
        raise UnknownModelError(f"the model {name[:100]!r} is not served here; served: {', '.join(served)}")


def _check_num_choices(num_prompts: int, body: SamplingBody) -> None:
    num_choices = num_prompts * (body.n or 1)
    if num_choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n = {body.n or 1} are {num_choices} answers; one request may ask for "
            f"{MAX_CHOICES}",
            param="n" if num_prompts == 1 else "prompt",
        )


def _num_characters(prompts: Sequence[Any]) -> int:
    return sum(len(prompt) for prompt in prompts)


async def off_loop_if_long(num_characters: int, work: Callable[[], T]) -> T:
    """The work's result; on a thread where so many characters would hold up the streams."""
    return work() if num_characters <= INLINE_PROMPT_CHARACTERS else await asyncio.to_thread(work)
