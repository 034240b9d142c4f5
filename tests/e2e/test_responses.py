"""OpenAI's responses with the real `openai` client: whole, streamed, in the background, gone on from, with tools."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from tests.support.running_server import wait_until

ASKED: dict[str, Any] = {"model": "tiny", "input": "Hi?", "max_output_tokens": 12, "temperature": 0}
SKY: dict[str, Any] = {
    "type": "function",
    "name": "sky",
    "parameters": {
        "type": "object",
        "properties": {"days": {"enum": [11, 22]}},
        "required": ["days"],
        "additionalProperties": False,
    },
    "strict": True,
}


def chat_text(client: OpenAI, messages: list[Any]) -> str:
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    return chat.choices[0].message.content or ""


def test_a_response_is_the_chat_answer_and_can_be_retrieved(client: OpenAI) -> None:
    response = client.responses.create(**ASKED, instructions="Be brief.", metadata={"for": "a test"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
    assert response.output_text == chat_text(client, messages) and response.output[0].type == "message"
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens" and response.metadata == {"for": "a test"}
    assert response.usage is not None and response.usage.output_tokens == 12
    assert response.usage.total_tokens == response.usage.input_tokens + 12
    assert client.responses.retrieve(response.id).model_dump() == response.model_dump()
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_stream_adds_up_to_the_response(client: OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    with client.responses.stream(**ASKED) as stream:
        events = list(stream)
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete" and text == whole.output_text == last.response.output_text
    assert last.response.usage is not None and whole.usage is not None
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    assert client.responses.retrieve(last.response.id).output_text == text


def test_a_conversation_goes_on(client: OpenAI) -> None:
    first = client.responses.create(**ASKED, instructions="Forgotten.")
    second = client.responses.create(**{**ASKED, "input": "And?"}, previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And?"},
    ]
    assert second.output_text == chat_text(client, messages) and second.previous_response_id == first.id
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi?"}]},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "And?"},
    ]
    by_items = client.responses.create(**{**ASKED, "input": items})
    assert by_items.output_text == second.output_text


def test_tools_are_called_and_their_results_taken(client: OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": 90, "temperature": 1, "tools": [SKY], "tool_choice": "required"}
    first = client.responses.create(**asked, parallel_tool_calls=False)
    (call,) = first.output
    assert call.type == "function_call" and call.name == "sky" and first.status == "completed"
    assert json.loads(call.arguments)["days"] in (11, 22)
    with client.responses.stream(**asked, parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 3 and final.output[0].type == "function_call"
    result: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "blue"}]
    second = client.responses.create(**{**ASKED, "input": result}, previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "Hi?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "sky", "arguments": call.arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "blue"},
    ]  # fmt: skip
    assert second.output_text == chat_text(client, messages)


def test_a_conversation_goes_on_from_a_call_that_was_cut_off(client: OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": 46, "temperature": 1, "tools": [SKY], "tool_choice": "required"}
    first = client.responses.create(**asked)
    assert first.status == "incomplete"
    assert [(item.type, item.status) for item in first.output] == [("function_call", "incomplete")]  # type: ignore[union-attr]
    second = client.responses.create(**{**ASKED, "input": "And?"}, previous_response_id=first.id)
    question, again = {"role": "user", "content": "Hi?"}, {"role": "user", "content": "And?"}
    assert second.output_text == chat_text(client, [question, {"role": "assistant", "content": ""}, again])
    items: list[Any] = [question, *[item.model_dump(exclude_none=True) for item in first.output], again]
    assert client.responses.create(**{**ASKED, "input": items}).output_text == second.output_text


def test_a_schema_is_followed(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    text: Any = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    response = client.responses.create(**{**ASKED, "max_output_tokens": 40}, text=text)
    assert json.loads(response.output_text)["n"] in (1, 2) and response.status == "completed"


def test_in_the_background_until_it_ends_or_is_cancelled(client: OpenAI) -> None:
    quick = client.responses.create(**ASKED, background=True)
    assert quick.status == "in_progress" and quick.background
    wait_until(lambda: client.responses.retrieve(quick.id).status == "incomplete")
    assert client.responses.retrieve(quick.id).output_text == client.responses.create(**ASKED).output_text
    long = client.responses.create(**{**ASKED, "max_output_tokens": 400}, background=True)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has ended already"):
        client.responses.cancel(quick.id)
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.responses.create(**ASKED, previous_response_id=long.id)


def test_a_reader_who_leaves_cancels_it(client: OpenAI) -> None:
    with client.responses.create(**{**ASKED, "max_output_tokens": 400}, stream=True) as stream:
        first = next(iter(stream))
        assert first.type == "response.created"
    wait_until(lambda: client.responses.retrieve(first.response.id).status == "cancelled")
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.responses.create(**ASKED, previous_response_id=first.response.id)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "sky"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "sky", "arguments": "{"}]}, "input.0.arguments"),
        ({"input": [{"content": "x"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "what": 1}}}, "text.format.what"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "string", "not": {}}}}}, "text.format"),
        ({"tools": [SKY], "tool_choice": {"type": "function", "function": {"name": "sky"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"verbosity": "high"}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"background": True, "store": False}, "background"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_bodies_name_the_field(http: httpx.Client, fields: dict[str, Any], named: str) -> None:
    answer = http.post("/v1/responses", json={**ASKED, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == named.split(".")[0], error
    assert named in error["message"] and not re.search("messages|max_tokens|response_format", error["message"]), error


def test_what_is_not_stored_is_not_found(client: OpenAI) -> None:
    response = client.responses.create(**ASKED, store=False)
    for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASKED, previous_response_id=response.id)
