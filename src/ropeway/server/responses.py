"""OpenAI's responses on the way out: items of output, whole and as events. Knows no routes, sockets or engine.

A whole response is what its events add up to, so it cannot differ from the stream.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from ropeway.engine.output_stream import OutputStream
from ropeway.errors import RopewayError
from ropeway.outputs import Delta
from ropeway.server.choices import ChoiceNews, RequestChoices
from ropeway.server.conversation import ChatMessage
from ropeway.server.errors import error_body
from ropeway.server.openai import Generation, Usage, computation_error
from ropeway.server.responses_body import ResponsesBody, arguments_fault, call_message

Event = dict[str, Any]
Fields = dict[str, Any]


class OutputItems:
    """Turns news into events of output items, and keeps what they add up to."""

    def __init__(self) -> None:
        self.items: list[Fields] = []
        self._is_open = False

    def push(self, news: ChoiceNews) -> list[Event]:
        events: list[Event] = []
        if news.reasoning:
            self._grow_text("reasoning", news.reasoning, events)
        if news.text:
            self._grow_text("message", news.text, events)
        for call in news.calls:
            if call.name is not None:
                fields = {"call_id": f"call_{secrets.token_hex(12)}", "name": call.name, "arguments": ""}
                self._begin("function_call", "fc_", fields, events)
            if call.arguments:
                self.items[-1]["arguments"] += call.arguments
                events.append(self._event("function_call_arguments.delta", delta=call.arguments))
        if news.finish_reason is not None:
            self._end("completed" if news.finish_reason in ("stop", "tool_calls") else "incomplete", events)
        return events

    def messages(self) -> list[ChatMessage]:
        """The items as the assistant's message in a conversation that goes on, but for calls that were not finished."""
        text = "".join(part["text"] for item in self.items if item["type"] == "message" for part in item["content"])
        calls = [item for item in self.items if item["type"] == "function_call" and _is_made(item)]
        fields = {"role": "assistant", "content": text, **(call_message(calls) if calls else {})}
        return [ChatMessage.model_validate(fields)]

    def close(self) -> None:
        """There is no more news: an item whose end has not come is incomplete."""
        self._end("incomplete", [])

    def _grow_text(self, kind: str, text: str, events: list[Event]) -> None:
        is_message = kind == "message"
        part_type = "output_text" if is_message else "reasoning_text"
        if not self._is_open or self.items[-1]["type"] != kind:
            fields: Fields = {"role": "assistant"} if is_message else {"summary": []}
            self._begin(kind, "msg_" if is_message else "rs_", {**fields, "content": []}, events)
            part = {"type": part_type, "text": ""}
            if is_message:
                part = {**part, "annotations": [], "logprobs": []}  # type: ignore[dict-item]
            self.items[-1]["content"].append(part)
            events.append(self._event("content_part.added", content_index=0, part=dict(part)))
        self.items[-1]["content"][0]["text"] += text
        more: Fields = {"logprobs": []} if is_message else {}
        events.append(self._event(f"{part_type}.delta", content_index=0, delta=text, **more))

    def _begin(self, kind: str, prefix: str, fields: Fields, events: list[Event]) -> None:
        self._end("completed", events)
        self._is_open = True
        item = {"id": f"{prefix}{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        events.append({"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown})

    def _end(self, status: str, events: list[Event]) -> None:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            events.append(self._event("function_call_arguments.done", arguments=item["arguments"], name=item["name"]))
        else:
            part = item["content"][0]
            more: Fields = {"logprobs": []} if item["type"] == "message" else {}
            events.append(self._event(f"{part['type']}.done", content_index=0, text=part["text"], **more))
            events.append(self._event("content_part.done", content_index=0, part=dict(part)))
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)})

    def _event(self, kind: str, **fields: Any) -> Event:
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **at, **fields}


def _is_made(call: Fields) -> bool:
    return call["status"] == "completed" and arguments_fault(call["arguments"]) is None


class LiveResponse:
    """One response as it grows, and when it has ended: `object` at any time. Writes its events, if they are wanted.

    It is stored for long, so it keeps what is shown of a generation and of its body, not the prompt. on_ended: called
    once its status is final.
    """

    ping = b": ping\n\n"

    def __init__(self, generation: Generation, body: ResponsesBody, on_ended: Callable[[], None]) -> None:
        params = generation.requests[0].params
        self._id, self._created, self._model = generation.answer_id, generation.created, generation.model
        self._temperature, self._top_p = params.temperature, params.top_p
        self._body = body.model_copy(update={"input": ""})
        self._on_ended = on_ended
        self._choices: RequestChoices | None
        (self._choices,) = generation.news_of().values()  # until it is closed
        self._usage = Usage(generation.num_prompt_tokens)
        self.items = OutputItems()
        self.status = "in_progress"
        self._error: Fields | None = None
        self._finish_reason: str | None = None
        self._num_reasoning_tokens = 0  # that came with reasoning and nothing else
        self._num_events = 0

    @property
    def is_over(self) -> bool:
        return self.status != "in_progress"

    def object(self) -> Fields:
        """The response as it is now."""
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "background": bool(body.background),
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self.items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.is_stored,
            "temperature": self._temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": self._top_p,
            "truncation": "disabled",
            "usage": self._usage_fields() if self.is_over else None,
            "user": body.user,
        }

    def first(self) -> bytes:
        shown = self.object()
        return self._written([{"type": f"response.{name}", "response": shown} for name in ("created", "in_progress")])

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        try:
            return self._written(self._news(deltas))
        except RopewayError:
            raise  # the caller tells of it
        except Exception:
            self._error = {"code": "server_error", "message": "the server failed; its log tells why"}
            try:
                self._finish("failed")
            finally:
                self.end("failed")  # however far the items had come
            raise

    def _news(self, deltas: Sequence[Delta]) -> list[Event]:
        assert self._choices is not None, "a delta after the last"
        events: list[Event] = []
        for delta in deltas:
            self._usage.add(delta)
            if delta.finish_reason == "error":
                raise computation_error()
            for news in self._choices.push(delta):
                events += self.items.push(news)
                if news.reasoning and not (news.text or news.calls):
                    self._num_reasoning_tokens += len(delta.token_ids)
            self._finish_reason = delta.finish_reason or self._finish_reason
        return events

    def last(self) -> bytes:
        # No reason: it was closed in the very step that ended it.
        self._finish({"length": "incomplete", "abort": "cancelled"}.get(self._finish_reason or "abort", "completed"))
        name = {"cancelled": "failed"}.get(self.status, self.status)
        return self._written([{"type": f"response.{name}", "response": self.object()}])

    def failure(self, error: RopewayError) -> bytes:
        """An error after the start is told as the response's own."""
        told = orjson.loads(error_body(error)[1])["error"]
        self._error = {"code": "server_error", "message": told["message"]}
        self._finish("failed")
        return self._written([{"type": "response.failed", "response": self.object()}])

    def close(self) -> None:
        """Lets go of what reads the answer. What has not ended by now is cancelled: its client has left."""
        self._choices = None
        self._finish("cancelled")

    def _finish(self, status: str) -> None:
        self.items.close()
        self.end(status)

    def end(self, status: str) -> None:
        """Its status is final; nothing changes it later."""
        if not self.is_over:
            self.status = status
            self._on_ended()

    def writer(self) -> LiveResponse:
        return self

    async def whole(self, stream: OutputStream) -> bytes:
        """The unstreamed response. Raises the error that ended it."""
        try:
            self.chunks(await stream.take_all())
            self.last()
        except RopewayError as error:
            self.failure(error)
            raise
        finally:
            self.close()
        return orjson.dumps(self.object())

    def _usage_fields(self) -> Fields:
        usage = self._usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }

    def _written(self, events: Sequence[Event]) -> bytes:
        parts = []
        for event in events:
            data = orjson.dumps({**event, "sequence_number": self._num_events})
            parts.append(b"event: " + str(event["type"]).encode() + b"\ndata: " + data + b"\n\n")
            self._num_events += 1
        return b"".join(parts)
