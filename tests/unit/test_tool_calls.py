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
from ropeway.text.grammar import Grammars, choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from ropeway.text.reasoning import ReasoningSplitter, thinks
from ropeway.text.tool_calls import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    ToolCallParser,
    ToolFormat,
    call_beginnings,
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

NAMES = ("f", "g", "late", "g.h", "get_weather", "stop_lift")
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
    (HERMES, '<tool_call>{"name": "Ada", "arguments": {}}', '<tool_call>{"name": "Ada", "arguments": {}}', []),
    (HERMES, '<tool_call>{"name": "Ada", "argum', '<tool_call>{"name": "Ada", "argum', []),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"a": "é"}}', "", [("f", {"a": "é"})]),
    (
        LLAMA3_JSON,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        "",
        [("f", {}), ("g", {"b": 2})],
    ),
    (LLAMA3_JSON, "The answer is {1}.", "The answer is {1}.", []),
    (LLAMA3_JSON, '{"city": "Bern"}', '{"city": "Bern"}', []),
    (LLAMA3_JSON, '{"name": "Ada", "age": 36}\n\n[1; 2]', '{"name": "Ada", "age": 36}\n\n[1; 2]', []),
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
    (PYTHONIC, "[f(), exit()]", "[f(), exit()]", []),
    (PYTHONIC, "[f(a=1", "[f(a=1", []),
    (PYTHONIC, "plain", "plain", []),
]


def read(tool_format: ToolFormat, pieces: list[str], **options: Any) -> tuple[str, list[Call]]:
    parser = ToolCallParser(tool_format, NAMES, **options)
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
    parser = ToolCallParser(HERMES, NAMES)
    parser.push('<tool_call>\n{"name": "f", "arguments": {"text": "ab')
    (call,) = parser.push("cd").calls
    assert (call.index, call.name, call.arguments) == (0, None, "cd")


def test_one_call_where_they_are_not_parallel() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert read(HERMES, [text], is_parallel=False) == ("", [("f", {})])
    assert read(PYTHONIC, ["[f(), g()]"], is_parallel=False) == ("", [("f", {})])


# Answers in JSON, such as may come instead of calls: format, text, calls
EITHER: list[tuple[ToolFormat, str, list[Call]]] = [
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})]),
    (HERMES, '{"say": "<tool_call>{\\"name\\": \\"f\\", \\"arguments\\": {}}"}', []),
    (HERMES, '["<tool_call>{}", "<tool', []),
    (HERMES, "<tool", []),
    (LLAMA3_JSON, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
    (LLAMA3_JSON, '{"name": "Ada", "age": 36}', []),
    (LLAMA3_JSON, '{"name": "f", "age": 36}', []),
    (LLAMA3_JSON, '{"name": "f", "parameters": "none"}', []),
    (LLAMA3_JSON, '{"name": "f"}', []),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', [("f", {"a": 1})]),
    (MISTRAL, '["[TOOL_CALLS]", {"name": "f", "arguments": {}}]', []),
    (PYTHONIC, "[f(a=1), g()]", [("f", {"a": 1}), ("g", {})]),
    (PYTHONIC, '[1, "f()"]', []),
]


@pytest.mark.parametrize(("tool_format", "text", "calls"), EITHER)
def test_an_answer_that_is_calls_or_content(tool_format: ToolFormat, text: str, calls: list[Call]) -> None:
    expected = ("" if calls else text, calls)
    assert read(tool_format, [text], is_either=True) == expected
    assert read(tool_format, list(text), is_either=True) == expected


def test_content_that_may_be_calls_is_held_no_longer_than_it_may() -> None:
    parser = ToolCallParser(LLAMA3_JSON, NAMES, is_either=True)
    assert parser.push('{"name": "').content == "" and parser.push("Ada").content == '{"name": "Ada'
    assert parser.push('", ').content == '", '


def test_a_call_cut_short_keeps_what_was_told() -> None:
    parser = ToolCallParser(HERMES, NAMES)
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


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "integer"}},
    "required": ["name"],
}
ANSWERS: dict[str, tuple[str, list[str]]] = {
    "schema": (
        json_schema_grammar(PERSON),
        [
            '{"name": "Ada"}',
            '{"name": "get_weather", "parameters": 3}',
            '{"name": "get_weatherman"}',
            '{"name": "get_weather", "age": 36}',
            '{"name": "", "say": "<tool_call>"}',
        ],
    ),
    "object": (json_schema_grammar({"type": "object"}), ["{}", '{"names": {"name": [1, "sky"]}}']),
    "array": (json_schema_grammar({"type": "array"}), ["[]", '["TOOL_CALLS", [1, 2]]']),
    "regex": (regex_grammar("[a-f]{4}"), ["abcd"]),
    "choice": (choice_grammar(["yes", "no"]), ["no"]),
    "grammar": (lark_grammar('start: "(" inner ")"\ninner: "x" | "[" inner "]"'), ["([[x]])"]),
}


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC], ids=lambda each: each.name)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_call_may_be_made_instead_of_an_answer_that_follows_a_grammar(
    llm: LLM, tool_format: ToolFormat, answer: str
) -> None:
    """Whatever the beginnings of both have in common, each can be written to its end, and nothing else can."""
    grammars, (grammar, texts) = Grammars(llm.tokenizer), ANSWERS[answer]
    tools = [STOP, WEATHER]
    either = tools_grammar(tool_format, tools, llm.tokenizer, is_parallel=True, answer=grammar)

    def is_allowed(text: str) -> bool:
        matcher = grammars.new_matcher(either).matcher
        token_ids = llm.tokenizer.encode(text, add_bos=False)
        return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())

    arguments = '{"city": "Bern", "days": 2}'
    weather = f'{{"name": "get_weather", "parameters": {arguments}}}'
    calls = {
        HERMES: f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>',
        LLAMA3_JSON: f'{{"name": "stop_lift", "parameters": {{}}}}; {weather}',
        MISTRAL: f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {arguments}}}]',
        PYTHONIC: '[stop_lift(), get_weather(city="Bern", days=2)]',
    }
    call = calls[tool_format]
    assert call.startswith(call_beginnings(tool_format, NAMES))
    for text in (call, *texts):
        assert is_allowed(text), text
    assert not is_allowed(call + texts[0]) and not is_allowed("Well")


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
