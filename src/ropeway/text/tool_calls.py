"""Tool calls in the text of an answer: which format a model writes them in, and how to read them as they arrive.

The format follows from the chat template; a template that knows no tools gets Hermes', described in a system message.
Knows no JSON of any API, no engine.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

FormatName = Literal["hermes", "llama3-json", "mistral", "pythonic"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. opener: what announces one; None where a call is the whole answer. closer: what follows
    each. arguments_key: beside "name", in the JSON of a call.
    """

    name: FormatName
    opener: str | None
    closer: str | None
    arguments_key: str


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments")
LLAMA3_JSON = ToolFormat("llama3-json", None, None, "parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", None, "arguments")
PYTHONIC = ToolFormat("pythonic", None, None, "")


def tool_format_of(template: str | None) -> ToolFormat:
    """The format that a chat template teaches; Hermes' where it teaches none."""
    source = template or ""
    if "<tool_call>" in source:
        return HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "func_name1(" in source or "[func1(" in source:
        return PYTHONIC
    if "<|python_tag|>" in source or '"parameters": dictionary' in source:
        return LLAMA3_JSON
    return HERMES


def call_beginnings(tool_format: ToolFormat, tool_names: Collection[str]) -> tuple[str, ...]:
    """How a text of calls alone begins, in the spelling that a grammar of calls holds it to."""
    if tool_format.opener is not None:
        return (tool_format.opener,)
    if tool_format is PYTHONIC:
        return tuple(f"[{name}(" for name in tool_names)
    return tuple("".join(call_head(tool_format, name)) + "{" for name in tool_names)


def call_head(tool_format: ToolFormat, tool_name: str) -> tuple[str, ...]:
    """What stands before the arguments of a call written as JSON, by the lexemes of JSON."""
    return ("{", '"name"', ": ", json.dumps(tool_name), ", ", f'"{tool_format.arguments_key}"', ": ")


@dataclass(slots=True)
class CallDelta:
    """What is new of the index-th call of an answer. name: with the first news of it."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedText:
    """What a piece of text held: plain content, and news of calls."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class _JsonCall:
    """Reads one JSON object of a call, character by character; gives out its name, and its arguments as they come."""

    def __init__(self, arguments_key: str) -> None:
        self._arguments_key = arguments_key
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None
        self._token = ""  # the string or value at depth 1 that is being read
        self._is_value = False
        self._pending = ""  # arguments that came before the name, or that are themselves a string
        self.raw = ""
        self.name: str | None = None
        self.has_arguments = False
        self.is_complete = False

    def push(self, character: str) -> str:
        """Takes the next character; the arguments that may be shown with it."""
        self.raw += character
        was_string = self._in_string
        self._track(character)
        if was_string or self._in_string or self._depth > 1 or character in "]}" and self._depth == 1:
            return self._take(character)
        if character == ":" and not self._is_value:
            self._key, self._token, self._is_value = _decoded(self._token), "", True
        elif self._is_value and (character == "," or self._depth == 0):
            return self._end_value()
        else:
            return self._take(character)
        return ""

    def _track(self, character: str) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "]}":
            self._depth -= 1
            self.is_complete = self._depth == 0

    def _take(self, character: str) -> str:
        if self._depth == 1 and character == "{" and not self._is_value and not self._in_string:
            return ""  # the object's own brace
        if not self._token and character.isspace():
            return ""
        self._token += character
        is_shown = self._is_value and self._key == self._arguments_key and self._token[0] != '"'
        return self._show(character) if is_shown else ""

    def _show(self, text: str) -> str:
        self.has_arguments = True
        if self.name is None:
            self._pending += text
            return ""
        return text

    def _end_value(self) -> str:
        key, token = self._key, self._token
        self._key, self._token, self._is_value = None, "", False
        if key == "name":
            self.name = _decoded(token.strip())
            shown, self._pending = self._pending, ""
            return shown if self.name is not None else ""
        if key == self._arguments_key and token.startswith('"'):
            return self._show(_decoded(token.strip()) or "")
        return ""


def _decoded(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class ToolCallParser:
    """Splits the text of one answer into content and calls, however it is cut into pieces.

    tool_names: of the functions that can be called. is_parallel: False shows the first call only. is_either: by its
    grammar the answer is calls or content, never both. What looks like a call and is none is content.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tool_names: Collection[str],
        *,
        is_parallel: bool = True,
        is_either: bool = False,
    ) -> None:
        self._format = tool_format
        self._tool_names = tool_names
        self._is_parallel = is_parallel
        self._held = ""
        self._call: _JsonCall | None = None
        self._is_told = False  # the call being read has been announced
        self._found = ParsedText()
        self.num_calls = 0
        self._beginnings = call_beginnings(tool_format, tool_names) if is_either else ()
        self._state: Callable[[], bool] = self._in_text
        if is_either:
            self._state = self._at_choice
        elif tool_format.opener is None:
            self._state = self._at_start

    def push(self, text: str) -> ParsedText:
        """What the next piece of text adds."""
        self._held += text
        while self._held and self._state():
            pass
        return self._taken()

    def finish(self) -> ParsedText:
        """The rest, when no more text will come."""
        if self._call is not None:
            if not self._is_told:  # cut off before it had the name of a tool: content
                self._found.content += (self._format.opener or "") + self._call.raw
        elif self._state == self._in_list:
            self._found.content += self._held
        elif not (self.num_calls and not self._held.strip()):
            self._found.content += self._held
        self._held, self._call = "", None
        return self._taken()

    def _taken(self) -> ParsedText:
        found, self._found = self._found, ParsedText()
        return found

    # Each state takes some of what is held; False where it needs more text.

    def _at_choice(self) -> bool:
        """Where an answer is calls or content, its beginning tells."""
        if self._held.startswith(self._beginnings):
            self._state = self._at_start if self._format.opener is None else self._in_text
        elif any(beginning.startswith(self._held) for beginning in self._beginnings):
            return False
        else:
            self._state = self._in_content
        return True

    def _in_text(self) -> bool:
        opener = self._format.opener
        assert opener is not None
        before, found, after = self._held.partition(opener)
        if found:
            self._tell_content(before)
            self._held, self._state = after, self._before_call
            return True
        num_kept = next((n for n in range(min(len(opener) - 1, len(before)), 0, -1) if before.endswith(opener[:n])), 0)
        shown = before[: len(before) - num_kept]
        if self.num_calls and not shown.strip():
            return False  # white space between calls
        self._tell_content(shown)
        self._held = before[len(before) - num_kept :]
        return False

    def _tell_content(self, text: str) -> None:
        if not (self.num_calls and not text.strip()):
            self._found.content += text

    def _at_start(self) -> bool:
        """Where a call is the whole answer, its first character tells."""
        text = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        if not text or "<|python_tag|>".startswith(self._held.lstrip()):
            return False
        if self._format is PYTHONIC:
            self._state = self._in_list if text.startswith("[") else self._in_content
        elif text.startswith("{"):
            self._held, self._state = text, self._before_call
        else:
            self._state = self._in_content
        return True

    def _in_content(self) -> bool:
        self._found.content += self._held
        self._held = ""
        return False

    def _before_call(self) -> bool:
        """Between the opener, or the last call, and the next one."""
        text = self._held.lstrip()
        closer = self._format.closer
        if closer is not None and text and (text.startswith(closer) or closer.startswith(text)):
            if not text.startswith(closer):
                return False
            self._held, self._state = text[len(closer) :], self._in_text
            return True
        text = text.lstrip("[,;] \n")
        if not text:
            self._held = ""
            return False
        if text[0] != "{":
            self._state = self._in_text if self._format.opener else self._in_content
            if not self.num_calls:
                self._found.content += self._format.opener or ""
            return True
        self._call, self._is_told = _JsonCall(self._format.arguments_key), False
        self._held, self._state = text, self._in_call
        return True

    def _in_call(self) -> bool:
        call = self._call
        assert call is not None
        arguments, num_read = "", 0
        for character in self._held:
            num_read += 1
            arguments += call.push(character)
            if call.is_complete:
                break
        self._held = self._held[num_read:]
        if call.name is not None and call.name in self._tool_names:
            if call.is_complete and not call.has_arguments:
                arguments += "{}"
            self._tell_call(call.name, arguments)
        if not call.is_complete:
            return False
        self._call, self._state = None, self._before_call
        if self._is_told:
            self.num_calls += 1
        else:
            self._found.content += (self._format.opener or "") + call.raw
            if self._format.opener is None:
                self._state = self._in_content
        return True

    def _tell_call(self, name: str, arguments: str) -> None:
        if self.num_calls and not self._is_parallel:
            self._is_told = True
            return
        if not self._is_told or arguments:
            self._found.calls.append(CallDelta(self.num_calls, None if self._is_told else name, arguments))
        self._is_told = True

    def _in_list(self) -> bool:
        """Python's calls are read when their list is complete."""
        try:
            tree = ast.parse(self._held.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        calls = tree.body.elts if isinstance(tree.body, ast.List) else []
        read = [_python_call(call) for call in calls]
        if not read or any(call is None or call[0] not in self._tool_names for call in read):
            self._state = self._in_content
            return True
        for index, call in enumerate(read if self._is_parallel else read[:1]):
            assert call is not None
            self._found.calls.append(CallDelta(index, *call))
            self.num_calls += 1
        self._held, self._state = "", self._in_content
        return False


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _python_call(node: ast.expr) -> tuple[str, str] | None:
    """(name, arguments as JSON) of f(a=1, b=[True]); None for anything else."""
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        return None
    arguments = {}
    for keyword in node.keywords:
        value = _NamesOfJson().visit(keyword.value)
        try:
            arguments[keyword.arg] = ast.literal_eval(value)
            json.dumps(arguments[keyword.arg])
        except (ValueError, TypeError):
            return None
    if None in arguments:
        return None
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)


class _NamesOfJson(ast.NodeTransformer):
    """true, false and null among Python's literals."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
