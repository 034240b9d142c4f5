"""Tool calls and reasoning read from text, however it is cut into pieces; their grammars; conversations with tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway import LLM, SamplingParams
from ropeway.errors import InvalidRequestError
from ropeway.server.tools import tool_use
from ropeway.text.reasoning import ReasoningSplitter, thinks
from ropeway.text.tool_calls import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    ToolCallParser,
    ToolFormat,
    tool_format_of,
)
from ropeway.text.tool_prompts import Tool, described_conversation, tools_grammar

Call = tuple[str, Any]
WEATHER = Tool(
    "get_weather",
    "Says the weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
STOP = Tool("stop_lift", "Stops", {"type": "object", "properties": {}, "additionalProperties": False})

# format, text, content, calls
TEXTS: list[tuple[ToolFormat, str, str, list[Call]]] = [
    (HERMES, "no call", "no call", []),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>',
        "",
        [("f", {"a": [1, {"b": "}"}]})],
    ),
    (
        HERMES,
        'See: <tool_call>{"arguments": {"x": "a\\"{b"}, "name": "late"}</tool_call>\n'
        '<tool_call>\n{"name": "g"}\n</tool_call>\n',
        "See: ",
        [("late", {"x": 'a"{b'}), ("g", {})],
    ),
    (HERMES, "a <tool_ b <tool_call", "a <tool_ b <tool_call", []),
    (HERMES, '<tool_call>{"nam', '<tool_call>{"nam', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    (HERMES, "<tool_call>what?</tool_call>", "<tool_call>what?</tool_call>", []),
    (HERMES, '<tool_call>{"city": "Bern"}</tool_call>', '<tool_call>{"city": "Bern"}', []),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"a": "é"}}', "", [("f", {"a": "é"})]),
    (
        LLAMA3_JSON,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        "",
        [("f", {}), ("g", {"b": 2})],
    ),
    (LLAMA3_JSON, "The answer is {1}.", "The answer is {1}.", []),
    (LLAMA3_JSON, '{"city": "Bern"}', '{"city": "Bern"}', []),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    (MISTRAL, "Sure [TOOL", "Sure [TOOL", []),
    (
        PYTHONIC,
        '[f(a=1, b="x"), g.h(c=[true, None, {"k": false}])]',
        "",
        [("f", {"a": 1, "b": "x"}), ("g.h", {"c": [True, None, {"k": False}]})],
    ),
    (PYTHONIC, "[1, 2]", "[1, 2]", []),
    (PYTHONIC, "[f(x)]", "[f(x)]", []),
    (PYTHONIC, "[f(a=1", "[f(a=1", []),
    (PYTHONIC, "plain", "plain", []),
]


def read(tool_format: ToolFormat, pieces: list[str], **options: Any) -> tuple[str, list[Call]]:
    parser = ToolCallParser(tool_format, **options)
    content, names, arguments = "", [], []
    for found in [*map(parser.push, pieces), parser.finish()]:
        content += found.content
        for call in found.calls:
            if call.name is not None:
                assert call.index == len(names)
                names.append(call.name)
                arguments.append("")
            arguments[call.index] += call.arguments
    return content, [(name, json.loads(each)) for name, each in zip(names, arguments, strict=True)]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), TEXTS)
def test_calls_and_content(tool_format: ToolFormat, text: str, content: str, calls: list[Call]) -> None:
    assert read(tool_format, [text]) == (content, calls)
    assert read(tool_format, list(text)) == (content, calls)


@given(st.sampled_from(TEXTS), st.data())
@settings(max_examples=150, deadline=None)
def test_any_cutting_reads_the_same(case: tuple[ToolFormat, str, str, list[Call]], data: st.DataObject) -> None:
    tool_format, text, content, calls = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(tool_format, pieces) == (content, calls)


def test_arguments_stream() -> None:
    parser = ToolCallParser(HERMES)
    parser.push('<tool_call>\n{"name": "f", "arguments": {"text": "ab')
    (call,) = parser.push("cd").calls
    assert (call.index, call.name, call.arguments) == (0, None, "cd")


def test_one_call_where_they_are_not_parallel() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert read(HERMES, [text], is_parallel=False) == ("", [("f", {})])
    assert read(PYTHONIC, ["[f(), g()]"], is_parallel=False) == ("", [("f", {})])


def test_a_call_cut_short_keeps_what_was_told() -> None:
    parser = ToolCallParser(HERMES)
    found = parser.push('<tool_call>{"name": "f", "arguments": {"a": 1')
    assert found.calls[0].name == "f" and found.calls[0].arguments == '{"a": 1'
    last = parser.finish()
    assert (last.content, last.calls) == ("", [])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, HERMES),
        ("{{ messages }}", HERMES),
        ("...<tool_call>{{ x }}</tool_call>", HERMES),
        ("[TOOL_CALLS] [{{ x }}]", MISTRAL),
        ('{"name": function name, "parameters": dictionary of argument name}', LLAMA3_JSON),
        ("<|python_tag|>", LLAMA3_JSON),
        ("[func_name1(params_name1=params_value1...)]", PYTHONIC),
    ],
)
def test_the_template_tells_the_format(template: str | None, expected: ToolFormat) -> None:
    assert tool_format_of(template) is expected


@pytest.fixture(scope="module")
def llm(tiny_model_path: Path) -> LLM:
    return LLM(tiny_model_path, max_model_len=512, num_kv_blocks=256, max_num_seqs=16, max_num_batched_tokens=64)


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC], ids=lambda each: each.name)
def test_a_call_that_must_be_made_is_one(llm: LLM, tool_format: ToolFormat) -> None:
    """The tiny model knows no calls: only the grammar can make it write one."""
    one = tools_grammar(tool_format, [WEATHER], llm.tokenizer, is_parallel=False)
    several = tools_grammar(tool_format, [STOP, WEATHER], llm.tokenizer, is_parallel=True)
    for grammar, is_parallel in ((one, False), (several, True)):
        params = SamplingParams(temperature=1, seed=2, n=3, max_tokens=300, grammar=grammar)
        for completion in llm.generate("x", params)[0].outputs:
            if completion.finish_reason == "length" and is_parallel:
                continue  # there may always be one more call
            content, calls = read(tool_format, [completion.text])
            assert completion.finish_reason == "stop" and content == "" and calls
            for name, arguments in calls:
                assert name in ("get_weather", "stop_lift")
                if name == "get_weather":
                    assert 1 <= arguments["days"] <= 9 and len(arguments["city"]) <= 8
            assert is_parallel or len(calls) == 1


def test_python_cannot_call_every_name(llm: LLM) -> None:
    for tool in (Tool("get-weather", "", {}), Tool("f", "", {"properties": {"a b": {"type": "integer"}}})):
        tools_grammar(HERMES, [tool], llm.tokenizer, is_parallel=False)
        with pytest.raises(InvalidRequestError, match="is no name in Python"):
            tools_grammar(PYTHONIC, [tool], llm.tokenizer, is_parallel=False)


def test_a_conversation_for_a_template_without_tools() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    system, user, assistant, result = described_conversation(messages, [WEATHER])
    assert system["role"] == "system" and '"name": "get_weather"' in system["content"]
    assert user == messages[0]
    assert assistant["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}
    (first, *_) = described_conversation([{"role": "system", "content": "Be brief."}], [WEATHER])
    assert first["content"].startswith("Be brief.\n\n")
    assert described_conversation(messages, [])[0] == messages[0]


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}


def test_what_tool_choice_asks_for() -> None:
    assert not tool_use(None, None, None).tools
    assert not tool_use(TOOLS, "none", None).tools
    auto = tool_use(TOOLS, None, False)
    assert len(auto.tools) == 2 and not auto.must_call and not auto.is_parallel
    assert [tool.name for tool in tool_use(TOOLS, "required", None).required] == ["f", "g"]
    named = tool_use(TOOLS, NAMED, None)
    assert [tool.name for tool in named.required] == ["g"] and named.is_named and not named.is_parallel


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([{"type": "retrieval"}], None),
        ([{"type": "function", "function": {}}], None),
        ([{"type": "function", "function": {"name": "a b"}}], None),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], None),
        ([{"type": "function", "function": {"name": "a", "what": 1}}], None),
        (TOOLS + TOOLS, None),
        (TOOLS, "maybe"),
        (TOOLS, {"type": "function"}),
        (TOOLS, {"type": "function", "function": {"name": "h"}}),
        (None, "required"),
    ],
)
def test_wrong_tools(tools: Any, choice: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tool_use(tools, choice, None)
    assert caught.value.param == ("tools" if choice is None else "tool_choice")


@pytest.mark.parametrize(
    ("starts_inside", "text", "reasoning", "answer"),
    [
        (False, "<think>\nhm, <b> so\n</think>\n\nYes.", "\nhm, <b> so\n", "Yes."),
        (True, "hm</think>Yes", "hm", "Yes"),
        (True, "cut of</thi", "cut of</thi", ""),
        (False, "Plain </think> text", "", "Plain </think> text"),
        (False, "  <thinner>", "", "  <thinner>"),
        (False, "<thi", "", "<thi"),
        (False, "<think></think>", "", ""),
        (False, "", "", ""),
    ],
)
def test_reasoning(starts_inside: bool, text: str, reasoning: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(starts_inside=starts_inside)
        found = [*map(splitter.push, pieces), splitter.finish()]
        assert ("".join(each[0] for each in found), "".join(each[1] for each in found)) == (reasoning, answer)
    assert thinks("{{ x }}</think>") and not thinks(None)
