"""The body of OpenAI's responses: which fields exist, and the conversation that it stands for. Knows no HTTP.

A body becomes the `ChatBody` that asks for the same, so both are served by one path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ropeway.errors import InvalidRequestError, UnsupportedFieldError
from ropeway.server.conversation import ROLES, ChatMessage
from ropeway.server.protocol import INERT_FIELDS, ChatBody

REFUSED_RESPONSES_FIELDS: dict[str, tuple[object, ...]] = {
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}),
    "stream_options": ({},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
INERT_RESPONSES_FIELDS = INERT_FIELDS - {"metadata", "store"}
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesBody(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    input: str | list[dict[str, Any]] = Field(description="Text, or a list of items.")
    instructions: str | None = Field(None, description="The system message; not carried over to later responses.")
    previous_response_id: str | None = Field(None, description="A stored response whose conversation goes on.")
    store: bool | None = Field(None, description="Whether it can be retrieved and gone on from; default: true.")
    background: bool | None = Field(None, description="Answer at once, and compute meanwhile; needs store.")
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema.")
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def messages(self) -> list[ChatMessage]:
        """What the input adds to a conversation. Raises InvalidRequestError."""
        if isinstance(self.input, str):
            return [ChatMessage(role="user", content=self.input)]
        messages: list[ChatMessage] = []
        for number, item in enumerate(self.input):
            _add_item(f"input.{number}", item, messages)
        if not messages:
            raise InvalidRequestError("input is empty; give at least one item", param="input")
        return messages

    def chat_body(self, conversation: Sequence[ChatMessage]) -> ChatBody:
        """The same request as a chat, of a conversation that ends with the input. Raises InvalidRequestError."""
        if self.background and (self.stream or not self.is_stored):
            raise InvalidRequestError("background needs store, and excludes stream", param="background")
        system = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        return _ResponseAsChat.model_validate(
            {
                "model": self.model,
                "messages": [*system, *conversation],
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "response_format": _response_format(self.text),
                "tools": [_tool(number, tool) for number, tool in enumerate(self.tools)] if self.tools else None,
                "tool_choice": _tool_choice(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
                "user": self.user,
            }
        )


class _ResponseAsChat(ChatBody):
    """A body of /v1/responses as the chat that asks for the same; its errors are told of the fields of the former."""

    @property
    def names_given(self) -> Mapping[str, str]:
        return {"max_tokens": "max_output_tokens", "response_format": "text.format"}


def call_message(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An assistant's calls, given as items, as fields of a chat message."""
    return {
        "tool_calls": [
            {
                "id": call["call_id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    }


def arguments_fault(arguments: str) -> str | None:
    """What keeps a call's arguments from being a part of a conversation; None where nothing does."""
    try:
        decoded = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return None if isinstance(decoded, dict) else "must be a JSON object"


def _add_item(where: str, item: Mapping[str, Any], messages: list[ChatMessage]) -> None:
    match item.get("type", "message"):
        case "message":
            _check_fields(where, item, {"role", "content", "phase"})
            role = item.get("role")
            if not isinstance(role, str):
                raise InvalidRequestError(f"{where}.role is required", param="input")
            if role not in ROLES:
                raise UnsupportedFieldError(
                    f"{where}.role {role[:40]!r} is not supported; supported: {', '.join(ROLES)}", param="input"
                )
            messages.append(ChatMessage(role=role, content=_text(f"{where}.content", item.get("content"))))
        case "function_call":
            _add_call(where, item, messages)
        case "function_call_output":
            _check_fields(where, item, {"call_id", "output"})
            fields = {"role": "tool", "content": _text(f"{where}.output", item.get("output"))}
            messages.append(ChatMessage.model_validate({**fields, "tool_call_id": str(item.get("call_id") or "")}))
        case "reasoning":
            pass  # what was thought before is not said again
        case other:
            raise UnsupportedFieldError(
                f"{where} is of type {str(other)[:40]!r}; served here: message, function_call, function_call_output "
                "and reasoning",
                param="input",
            )


def _add_call(where: str, item: Mapping[str, Any], messages: list[ChatMessage]) -> None:
    _check_fields(where, item, {"call_id", "name", "arguments"})
    if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
        raise InvalidRequestError(f"{where} needs call_id, name and arguments", param="input")
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if item.get("status") == "incomplete":  # cut off: it was not made, but it was the assistant's turn
        if last is None:
            messages.append(ChatMessage(role="assistant", content=""))
        return
    fault = arguments_fault(item["arguments"])
    if fault is not None:
        raise InvalidRequestError(f"{where}.arguments {fault}", param="input")
    calls = call_message([item])["tool_calls"]
    if last is not None and last.model_extra:
        calls = [*last.model_extra["tool_calls"], *calls]
        messages.pop()
    content = last.content if last is not None and last.model_extra else ""
    messages.append(ChatMessage.model_validate({"role": "assistant", "content": content, "tool_calls": calls}))


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequestError(f"{where} must be text or a list of parts", param="input")
    for number, part in enumerate(content):
        if part.get("type") not in _TEXT_PARTS:
            raise UnsupportedFieldError(
                f"{where}.{number} is of type {str(part.get('type'))[:40]!r}; only text is supported", param="input"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.{number}.text must be text", param="input")
    return "\n".join(part["text"] for part in content)


def _check_fields(where: str, item: Mapping[str, Any], known: set[str]) -> None:
    unknown = item.keys() - known - {"type", "id", "status"}
    if unknown:
        raise InvalidRequestError(f"unknown field '{where}.{min(unknown)[:40]}'", param=where.split(".")[0])


def _response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if text is None:
        return None
    unknown = text.keys() - {"format", "verbosity"}
    if unknown or text.get("verbosity") not in (None, "medium"):
        name = min(unknown) if unknown else "verbosity"
        raise UnsupportedFieldError(f"text.{name[:40]} is not supported; leave it out", param="text")
    given = text.get("format")
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given if given is None or isinstance(given, dict) else {"type": given}
    wrapped = {key: value for key, value in given.items() if key != "type"}
    unknown = wrapped.keys() - {"name", "description", "strict", "schema"}
    if unknown:
        raise InvalidRequestError(f"unknown field 'text.format.{min(unknown)[:40]}'", param="text")
    if "schema" not in wrapped:
        raise InvalidRequestError("text.format.schema is required", param="text")
    return {"type": "json_schema", "json_schema": wrapped}


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools.{number}"
    if tool.get("type") != "function":
        raise UnsupportedFieldError(
            f"{where} is of type {str(tool.get('type'))[:40]!r}; only functions are supported", param="tools"
        )
    _check_fields(where, tool, {"name", "description", "parameters", "strict"})
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise InvalidRequestError(
        'tool_choice must be none, auto, required, or {"type": "function", "name": NAME}', param="tool_choice"
    )
