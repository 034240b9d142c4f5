"""Anthropic's messages on the way out: blocks of content, whole and as events. Knows no routes, sockets or engine.

A whole message is what its events add up to, so it cannot differ from the stream. `input_tokens` are those of the
prompt that the prefix cache did not hold; `cache_read_input_tokens` those that it held.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from ropeway.engine.output_stream import OutputStream
from ropeway.errors import EngineStoppedError, RopewayError
from ropeway.outputs import Delta
from ropeway.server.choices import ChoiceNews
from ropeway.server.errors import anthropic_error_body
from ropeway.server.openai import Generation, Usage, computation_error

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
Event = dict[str, Any]


class ContentBlocks:
    """Turns news into events of content blocks, and keeps what they add up to."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._call_at: dict[int, int] = {}  # of a call -> its block

    @property
    def has_calls(self) -> bool:
        return bool(self._call_at)

    def push(self, news: ChoiceNews) -> list[Event]:
        events: list[Event] = []
        if news.reasoning:
            self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""}, events)
            self._grow("thinking", news.reasoning, {"type": "thinking_delta", "thinking": news.reasoning}, events)
        if news.text:
            self._begin("text", {"type": "text", "text": ""}, events)
            self._grow("text", news.text, {"type": "text_delta", "text": news.text}, events)
        for call in news.calls:
            if call.name is not None:
                self._end(events)
                self._call_at[call.index] = len(self.blocks)
                block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": call.name, "input": ""}
                self._begin("tool_use", block, events)
            if call.arguments:
                assert self._call_at[call.index] == len(self.blocks) - 1, "a call goes on after the next has begun"
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                self._grow("input", call.arguments, delta, events)
        if news.finish_reason is not None:
            self._end(events)
        return events

    def content(self) -> list[dict[str, Any]]:
        """The blocks of the whole message: the input of a call as JSON."""
        return [
            {**block, "input": _json_of(block["input"])} if block["type"] == "tool_use" else block
            for block in self.blocks
        ]

    def _begin(self, kind: str, block: dict[str, Any], events: list[Event]) -> None:
        """A new block, unless one of its kind is open, which goes on."""
        if self._is_open and self.blocks[-1]["type"] == kind:
            return
        self._end(events)
        self._is_open = True
        self.blocks.append(dict(block))
        shown = {**block, "input": {}} if kind == "tool_use" else block
        events.append({"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": shown})

    def _grow(self, field: str, text: str, delta: dict[str, str], events: list[Event]) -> None:
        self.blocks[-1][field] += text
        events.append({"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta})

    def _end(self, events: list[Event]) -> None:
        if self._is_open:
            self._is_open = False
            events.append({"type": "content_block_stop", "index": len(self.blocks) - 1})


class MessageWriter:
    """Writes one message as server-sent events. It begins with the first news: only then is known what was cached."""

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        (self._choices,) = generation.news_of().values()
        self._usage = Usage(generation.num_prompt_tokens)
        self._blocks = ContentBlocks()
        self._is_begun = False
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def first(self) -> bytes:
        return b""

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events of some deltas. Raises EngineStoppedError where the answer was cut off by the server."""
        events: list[Event] = []
        for delta in deltas:
            self._usage.add(delta)
            if delta.finish_reason == "error":
                raise computation_error()
            if delta.finish_reason == "abort":
                raise EngineStoppedError("the server has ended this request before its answer was whole")
            if not self._is_begun:
                self._is_begun = True
                events.append({"type": "message_start", "message": self._message([])})
            for news in self._choices.push(delta):
                events += self._blocks.push(news)
            if delta.finish_reason is not None:
                self._note_end(delta)
        return b"".join([_event(event) for event in events])

    def last(self) -> bytes:
        ending = {"type": "message_delta", "delta": self._stop, "usage": self._usage_fields()}
        return _event(ending) + _event({"type": "message_stop"})

    def failure(self, error: RopewayError) -> bytes:
        """An error after the start is an event of its own."""
        return b"event: error\ndata: " + anthropic_error_body(error)[1] + b"\n\n"

    def close(self) -> None:
        """Nothing of it outlives its stream."""

    def whole(self) -> bytes:
        """The message that the events add up to."""
        return orjson.dumps({**self._message(self._blocks.content()), **self._stop})

    def _note_end(self, delta: Delta) -> None:
        assert delta.finish_reason is not None
        reason = _STOP_REASONS[delta.finish_reason]
        if delta.matched_stop is not None:
            reason = "stop_sequence"
        elif self._blocks.has_calls and reason == "end_turn":
            reason = "tool_use"
        self._stop = {"stop_reason": reason, "stop_sequence": delta.matched_stop}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._generation.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage_fields(),
        }

    def _usage_fields(self) -> dict[str, int]:
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.num_completion_tokens,
        }


class MessageAnswer:
    """An answer to /v1/messages."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def writer(self) -> MessageWriter:
        return MessageWriter(self._generation)

    async def whole(self, stream: OutputStream) -> bytes:
        """The unstreamed answer. Raises EngineStoppedError where it was cut off."""
        writer = self.writer()
        writer.chunks(await stream.take_all())
        return writer.whole()


def _json_of(arguments: str) -> orjson.Fragment:
    """A call's arguments; where max_tokens cut them off, or they are no JSON, an empty object.

    They stay the text that the model wrote, as in a stream: JSON has numbers and escapes that orjson does not write.
    """
    try:
        json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return orjson.Fragment("{}")
    return orjson.Fragment(arguments)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _event(event: Event) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
