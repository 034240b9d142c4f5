"""The bodies of Anthropic's messages: which fields exist, and the conversation that they stand for. Knows no HTTP.

A body becomes the `ChatBody` that asks for the same, so both are served by one path. As there, a field is served,
inert, or refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ropeway.errors import InvalidRequestError, UnsupportedFieldError
from ropeway.server.conversation import ChatMessage
from ropeway.server.protocol import ChatBody

REFUSED_MESSAGES_FIELDS: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
}
INERT_MESSAGES_FIELDS = frozenset({"cache_control", "diagnostics", "inference_geo", "service_tier"})


class Metadata(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    user_id: str | None = Field(None, description="Whose share of the caller's service it uses.")


class AnthropicMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class CountTokensBody(BaseModel):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = Field(None, description="Text, or a list of text blocks.")
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = Field(None, description="auto, any, none, or a tool by name.")

    def chat_body(self) -> ChatBody:
        """The same request as OpenAI's clients would send it. Raises InvalidRequestError."""
        choice, is_parallel = _tool_choice(self.tool_choice)
        return ChatBody.model_validate(
            {
                "model": self.model,
                "messages": [*_system(self.system), *_conversation(self.messages)],
                "tools": [_tool(number, tool) for number, tool in enumerate(self.tools)] if self.tools else None,
                "tool_choice": choice,
                "parallel_tool_calls": is_parallel,
            }
        )


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None

    def chat_body(self) -> ChatBody:
        if self.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, not {self.max_tokens}", param="max_tokens")
        sampling = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "stop": self.stop_sequences,
            "user": None if self.metadata is None else self.metadata.user_id,
        }
        return super().chat_body().model_copy(update=sampling)


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> list[ChatMessage]:
    if not system:
        return []
    return [ChatMessage(role="system", content=_text("system", system))]


def _conversation(messages: Sequence[AnthropicMessage]) -> list[ChatMessage]:
    if messages[-1].role == "assistant":
        raise UnsupportedFieldError(
            "messages: the last one is the assistant's; continuing it is not supported: end with the user's",
            param="messages",
        )
    plain = []
    for index, message in enumerate(messages):
        where = f"messages.{index}.content"
        if isinstance(message.content, str):
            plain.append(ChatMessage(role=message.role, content=message.content))
        elif message.role == "user":
            plain += _user_messages(where, message.content)
        else:
            plain.append(_assistant_message(where, message.content))
    return plain


def _user_messages(where: str, blocks: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Results of tools, each a message of its own, then the text."""
    results, texts = [], []
    for number, block in enumerate(blocks):
        here = f"{where}.{number}"
        match block.get("type"):
            case "text":
                texts.append(_block_text(here, block))
            case "tool_result":
                _check_fields(here, block, {"tool_use_id", "content", "is_error"})
                text = _text(f"{here}.content", block.get("content") or "")
                call_id = str(block.get("tool_use_id") or "")
                results.append(ChatMessage(role="tool", content=text, tool_call_id=call_id))  # type: ignore[call-arg]
            case other:
                raise _unsupported_block(here, other, "text and tool_result")
    if texts or not results:
        results.append(ChatMessage(role="user", content="\n".join(texts)))
    return results


def _assistant_message(where: str, blocks: Sequence[Mapping[str, Any]]) -> ChatMessage:
    texts, calls = [], []
    for number, block in enumerate(blocks):
        here = f"{where}.{number}"
        match block.get("type"):
            case "text":
                texts.append(_block_text(here, block))
            case "tool_use":
                _check_fields(here, block, {"id", "name", "input", "caller"})
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
            case "thinking" | "redacted_thinking":
                pass  # what was thought before is not said again
            case other:
                raise _unsupported_block(here, other, "text, tool_use and thinking")
    return ChatMessage(role="assistant", content="\n".join(texts), tool_calls=calls)  # type: ignore[call-arg]


def _text(where: str, content: Any) -> str:
    """A text, or the texts of a list of text blocks, one a line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequestError(f"{where} must be text or a list of text blocks", param=where.split(".")[0])
    for number, block in enumerate(content):
        if block.get("type") != "text":
            raise _unsupported_block(f"{where}.{number}", block.get("type"), "text")
    return "\n".join(_block_text(f"{where}.{number}", block) for number, block in enumerate(content))


def _block_text(where: str, block: Mapping[str, Any]) -> str:
    _check_fields(where, block, {"text", "citations"})
    if block.get("citations"):
        raise UnsupportedFieldError(f"{where}.citations is not supported; leave it out", param=where.split(".")[0])
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be text", param=where.split(".")[0])
    return text


def _check_fields(where: str, block: Mapping[str, Any], known: set[str]) -> None:
    unknown = block.keys() - known - {"type", "cache_control"}
    if unknown:
        raise InvalidRequestError(f"unknown field '{where}.{min(unknown)[:40]}'", param=where.split(".")[0])


def _unsupported_block(where: str, kind: object, served: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(
        f"{where} is of type {str(kind)[:40]!r}; served here: {served}", param=where.split(".")[0]
    )


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools.{number}"
    if tool.get("type") not in (None, "custom"):
        raise UnsupportedFieldError(
            f"{where} is of type {str(tool['type'])[:40]!r}; only tools of the caller's own are supported",
            param="tools",
        )
    _check_fields(where, tool, {"name", "description", "input_schema", "strict"})
    function = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """(OpenAI's tool_choice, its parallel_tool_calls)."""
    if choice is None:
        return None, None
    _check_fields("tool_choice", choice, {"name", "disable_parallel_tool_use"})
    is_parallel = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case "auto" | "none" as same:
            return same, is_parallel
        case "any":
            return "required", is_parallel
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}, is_parallel
    raise InvalidRequestError("tool_choice.type must be auto, any, tool or none", param="tool_choice")
