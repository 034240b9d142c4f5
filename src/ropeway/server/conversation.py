"""The messages of a chat body: checked, and made plain for a chat template. Knows no parameters and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ropeway.errors import InvalidRequestError, UnsupportedFieldError
from ropeway.server.tools import message_calls
from ropeway.server.validation import from_validation

# Fields of a message that clients send back from an answer. They may only be empty.
_EMPTY_MESSAGE_FIELDS = ("function_call", "refusal", "annotations", "audio")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


def conversation_of(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """The messages for the chat template: role, content as one text, name. Raises InvalidRequestError."""
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: ChatMessage) -> dict[str, object]:
    where = f"messages.{index}"
    role = ROLES.get(message.role)
    if role is None:
        raise UnsupportedFieldError(
            f"{where}.role {message.role[:40]!r} is not supported; supported: {', '.join(ROLES)}", param="messages"
        )
    extra = dict(message.model_extra or {})
    calls = message_calls(where, extra.pop("tool_calls", None) or [])
    if calls and role != "assistant":
        raise InvalidRequestError(f"{where}.tool_calls belongs to an assistant's message", param="messages")
    call_id = extra.pop("tool_call_id", None)
    extra.pop("reasoning_content", None)  # what was thought before is not said again
    for name, value in extra.items():
        if name not in _EMPTY_MESSAGE_FIELDS:
            raise InvalidRequestError(f"unknown field '{where}.{name[:40]}'", param="messages")
        if value:
            raise UnsupportedFieldError(f"{where}.{name} is not supported; leave it out", param="messages")
    content = "" if calls and message.content is None else _plain_content(where, message.content)
    plain: dict[str, object] = {"role": role, "content": content}
    if calls:
        plain["tool_calls"] = calls
    if call_id is not None:
        plain["tool_call_id"] = call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _plain_content(where: str, content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequestError(f"{where}.content is required", param="messages")
    texts = []
    for number, fields in enumerate(content):
        try:
            part = ContentPart.model_validate({key: fields[key] for key in ("type", "text") if key in fields})
        except ValidationError as error:
            raise InvalidRequestError(f"{where}.content.{number}: {from_validation(error)}", param="messages") from None
        if part.type != "text":
            raise UnsupportedFieldError(
                f"{where}.content.{number} is of type {part.type[:40]!r}; only text is supported", param="messages"
            )
        if part.text is None:
            raise InvalidRequestError(f"{where}.content.{number}.text is required", param="messages")
        texts.append(part.text)
    return "\n".join(texts)
