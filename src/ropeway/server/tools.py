"""`tools`, `tool_choice` and the tool fields of messages, checked. Knows no bodies and no engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ropeway.errors import InvalidRequestError, UnsupportedFieldError
from ropeway.text.tool_prompts import Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and whether the answer must call one. `required`: which of them it must choose from."""

    tools: tuple[Tool, ...] = ()
    required: tuple[Tool, ...] = ()
    is_parallel: bool = True
    is_named: bool = False

    @property
    def must_call(self) -> bool:
        return bool(self.required)


def tool_use(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """What the three fields ask for. Raises InvalidRequestError naming the field."""
    parsed = tuple(_tool(number, tool) for number, tool in enumerate(tools or ()))
    if len(parsed) > MAX_TOOLS:
        raise InvalidRequestError(f"tools holds {len(parsed)} functions; at most {MAX_TOOLS} are taken", param="tools")
    if len({tool.name for tool in parsed}) < len(parsed):
        raise InvalidRequestError("tools holds two functions of one name", param="tools")
    is_parallel = parallel is not False
    mode, name = _choice("auto" if choice is None else choice)
    if mode == "none" or (mode == "auto" and not parsed):
        return ToolUse()
    if mode == "auto":
        return ToolUse(parsed, (), is_parallel)
    required = parsed if name is None else tuple(tool for tool in parsed if tool.name == name)
    if not required:
        what = "no tools are given" if name is None else f"no tool is named {name[:64]!r}"
        raise InvalidRequestError(f"tool_choice asks for a call, but {what}", param="tool_choice")
    return ToolUse(parsed, required, is_parallel and name is None, is_named=name is not None)


def _choice(choice: Any) -> tuple[Literal["none", "auto", "required"], str | None]:
    if choice in ("none", "auto", "required"):
        return choice, None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return "required", function["name"]
    raise InvalidRequestError(
        'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": NAME}}',
        param="tool_choice",
    )


def _tool(number: int, tool: Any) -> Tool:
    where = f"tools.{number}"
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise InvalidRequestError(f'{where} must be {{"type": "function", "function": {{...}}}}', param="tools")
    function = tool["function"]
    unknown = function.keys() - {"name", "description", "parameters", "strict"}
    if unknown:
        raise InvalidRequestError(f"{where}.function has the unknown field {min(unknown)[:40]!r}", param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes or underscores", param="tools"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError(f"{where}.function.parameters must be a JSON schema", param="tools")
    return Tool(name, str(function.get("description") or ""), parameters or {"type": "object", "properties": {}})


def message_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message as templates expect them: arguments decoded. Raises InvalidRequestError."""
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where}.tool_calls must be a list", param="messages")
    return [_message_call(f"{where}.tool_calls.{number}", call) for number, call in enumerate(calls)]


def _message_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must hold a function with a name", param="messages")
    if call.get("type", "function") != "function":
        raise UnsupportedFieldError(f"{where}.type must be function", param="messages")
    arguments = function.get("arguments") or "{}"
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}.function.arguments is not JSON: {error}", param="messages") from None
    if not isinstance(decoded, dict):
        raise InvalidRequestError(f"{where}.function.arguments must be a JSON object", param="messages")
    plain = {"name": function["name"], "arguments": decoded}
    return {"id": str(call.get("id") or ""), "type": "function", "function": plain}
