"""Tools on the way in: their grammar, and conversations with tools for templates that know none. Knows no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropeway.errors import InvalidRequestError
from ropeway.text.grammar import embedded_json, lark_grammar, with_subgrammar
from ropeway.text.tokenizer import Tokenizer
from ropeway.text.tool_calls import HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC, ToolFormat, call_head


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_openai(self) -> dict[str, Any]:
        """As templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tools_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    is_parallel: bool,
    answer: str | None = None,
) -> str:
    """A grammar of one call of one of `tools`, or of several; or of what the grammar `answer` allows, if there is one.

    Raises InvalidRequestError for a schema not supported.
    """
    rules = [_arguments_rule(tool_format, number, tool) for number, tool in enumerate(tools)]
    one = " | ".join(f"call_{number}" for number in range(len(tools)))
    opener, closer = (_spelled(text, tokenizer) for text in (tool_format.opener, tool_format.closer))
    start, separator = {
        HERMES.name: (f'{opener} "\\n" call "\\n" {closer}', '"\\n"'),
        LLAMA3_JSON.name: ("call", '"; "'),
        MISTRAL.name: ("call", '", "'),
        PYTHONIC.name: ("call", '", "'),
    }[tool_format.name]
    several = f"one ({separator} one)*" if is_parallel else "one"
    if tool_format is MISTRAL:
        several = f'{opener} "[" {several} "]"'
    elif tool_format is PYTHONIC:
        several = f'"[" {several} "]"'
    whole = several if answer is None else f"{several} | @answer"
    calls = lark_grammar("\n".join([f"start: {whole}", f"one: {start}", f"call: {one}", *rules]))
    return calls if answer is None else with_subgrammar(calls, "answer", answer)


def _arguments_rule(tool_format: ToolFormat, number: int, tool: Tool) -> str:
    if tool_format is not PYTHONIC:
        # By lexemes: a lexer goes on with the longest one, so a head in one piece would keep an answer in JSON from
        # beginning like it.
        head = " ".join(map(json.dumps, call_head(tool_format, tool.name)))
        schema = {"type": "object", **tool.parameters}
        return f'call_{number}: {head} arguments_{number} "}}"\narguments_{number}: %json {_schema(tool, schema)}'
    properties = tool.parameters.get("properties", {})
    for name in (*tool.name.split("."), *properties):
        if not name.isidentifier():
            raise InvalidRequestError(
                f"tools: {name[:64]!r} is no name in Python, which this model writes its calls in", param="tools"
            )
    required = [name for name in properties if name in tool.parameters.get("required", ())]
    rest = {key: value for key, value in tool.parameters.items() if key in ("$defs", "definitions")}
    names = [*required, *(name for name in properties if name not in required)]
    values = [
        f"value_{number}_{at}: %json {_schema(tool, {**rest, **properties[name]})}" for at, name in enumerate(names)
    ]
    parts = [f"{json.dumps(f'{name}=')} value_{number}_{at}" for at, name in enumerate(names)]
    arguments = ' ", " '.join(parts[: len(required)])
    for part in parts[len(required) :]:  # the optional ones, in order, each only behind something
        arguments = f'{arguments} (", " {part})?' if arguments else f"({part})?"
    return "\n".join([f'call_{number}: {json.dumps(tool.name + "(")} {arguments} ")"', *values])


def _schema(tool: Tool, schema: Mapping[str, Any]) -> str:
    try:
        return embedded_json(schema)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"tools: parameters of {tool.name!r}: {error}", param="tools") from None


def _spelled(marker: str | None, tokenizer: Tokenizer) -> str:
    """A marker in a grammar: text, or a token where the vocabulary has it as a control token."""
    if marker is None:
        return ""
    token_id = tokenizer.special_id(marker)
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def described_conversation(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """A conversation in plain roles, for a template that knows no tools: the system message describes them, calls and
    results are written as Hermes writes them.
    """
    plain = [_without_tools(message) for message in messages]
    if not tools:
        return plain
    functions = [tool.as_openai()["function"] for tool in tools]
    listed = "\n".join(
        json.dumps({key: value for key, value in function.items() if value}, ensure_ascii=False)
        for function in functions
    )
    text = (
        f"These functions can be called:\n<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments as JSON between tags, once for each call:\n"
        '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
    )
    if plain and plain[0]["role"] == "system":
        plain[0]["content"] = f"{plain[0]['content']}\n\n{text}"
    else:
        plain.insert(0, {"role": "system", "content": text})
    return plain


def _without_tools(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    if calls:
        plain["content"] = "\n".join([plain["content"], *calls] if plain["content"] else calls)
    return plain
