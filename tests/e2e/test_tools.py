"""Tools over HTTP with the real `openai` client: required, named, streamed, and conversations that used them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

# Short, because every character is a token of the tiny model, and its context has 512.
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "sky",
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [11, 22]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
MESSAGES: list[Any] = [{"role": "user", "content": "Sky?"}]
ASKED: dict[str, Any] = {
    "model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "temperature": 1, "seed": 3, "max_tokens": 90,
    "parallel_tool_calls": False,
}  # fmt: skip
NAMED: Any = {"type": "function", "function": {"name": "sky"}}


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_required_call(client: OpenAI, choice: Any, reason: str) -> None:
    answer = client.chat.completions.create(**ASKED, tool_choice=choice, n=2)
    assert answer.usage is not None and answer.usage.completion_tokens > 40
    for each in answer.choices:
        assert each.finish_reason == reason and each.message.content is None
        assert each.message.tool_calls is not None
        (call,) = each.message.tool_calls
        assert call.type == "function" and call.function.name == "sky" and call.id
        assert json.loads(call.function.arguments)["days"] in (11, 22)


def test_streamed_calls_are_unstreamed_ones(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED, tool_choice="required").choices[0]
    assert whole.message.tool_calls is not None
    names, arguments, reasons, num_pieces = [], "", [], 0
    for chunk in client.chat.completions.create(**ASKED, tool_choice="required", stream=True):
        (choice,) = chunk.choices
        reasons.append(choice.finish_reason)
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            assert call.index == 0 and call.function is not None
            if call.function.name:
                assert call.id and call.type == "function"
                names.append(call.function.name)
            arguments += call.function.arguments or ""
            num_pieces += 1
    assert names == ["sky"] and reasons[-1] == "tool_calls" and num_pieces > 3
    assert arguments == whole.message.tool_calls[0].function.arguments


def test_auto_and_none_leave_the_answer_free(client: OpenAI) -> None:
    asked = {**ASKED, "max_tokens": 12, "temperature": 0}
    auto = client.chat.completions.create(**asked).choices[0]
    assert auto.message.tool_calls is None and auto.message.content
    without = {key: value for key, value in asked.items() if key != "tools"}
    none = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert none.message.content == client.chat.completions.create(**without).choices[0].message.content


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "sky"]}, "age": {"enum": [36]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"extra_body": {"structured_outputs": {"json": PERSON}}},
    ],
    ids=["response_format", "structured_outputs"],
)
def test_auto_calls_or_answers_in_the_format(client: OpenAI, http: httpx.Client, form: dict[str, Any]) -> None:
    def asked(beginning: str) -> Any:
        (token_id,) = http.post("/tokenize", json={"prompt": beginning, "add_special_tokens": False}).json()["tokens"]
        return client.chat.completions.create(**ASKED, **form, logit_bias={str(token_id): 100}).choices[0]

    answer, call = asked("{"), asked("<")
    assert answer.finish_reason == "stop" and answer.message.tool_calls is None
    assert json.loads(answer.message.content)["age"] == 36
    assert call.finish_reason == "tool_calls" and call.message.content is None
    assert json.loads(call.message.tool_calls[0].function.arguments)["days"] in (11, 22)


def test_a_conversation_that_used_tools(client: OpenAI) -> None:
    first = client.chat.completions.create(**ASKED, tool_choice="required").choices[0].message
    assert first.tool_calls is not None
    messages: list[Any] = [
        *MESSAGES,
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
    assert answer.usage is not None and answer.usage.prompt_tokens > 140


def test_wrong_tools_name_the_field(client: OpenAI) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError, match="'not'") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[wrong], tool_choice="required")  # type: ignore[list-item]
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, tool_choice="required")  # type: ignore[call-overload]
    assert caught.value.param == "tool_choice"
