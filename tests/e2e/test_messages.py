"""Anthropic's messages with the real `anthropic` client: whole, streamed, with tools, and their errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from tests.support.running_server import RunningServer

MESSAGES: list[Any] = [{"role": "user", "content": "Hi?"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
COLD: dict[str, Any] = {"temperature": 0}  # served, though the client has no parameter for it
ASKED: dict[str, Any] = {**BODY, "extra_body": COLD}
SKY: dict[str, Any] = {
    "name": "sky",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"enum": [11, 22]}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
WITH_TOOL: dict[str, Any] = {**BODY, "max_tokens": 90, "tools": [SKY], "tool_choice": {"type": "tool", "name": "sky"}}


@pytest.fixture
def claude(server: RunningServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_the_chat_answer(claude: Anthropic, client: OpenAI) -> None:
    message = claude.messages.create(**ASKED, system="Be brief.")
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "Be brief."}, *MESSAGES], max_tokens=12, temperature=0
    )
    assert text_of(message) == chat.choices[0].message.content and message.id.startswith("msg_")
    assert message.stop_reason == "max_tokens" and message.stop_sequence is None and message.model == "tiny"
    assert chat.usage is not None and message.usage.output_tokens == chat.usage.completion_tokens == 12
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    blocks: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}]
    assert text_of(claude.messages.create(**{**ASKED, "messages": parts}, system=blocks)) == text_of(message)


def test_a_stream_adds_up_to_the_message(claude: Anthropic) -> None:
    whole = claude.messages.create(**ASKED)
    with claude.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert text_of(final) == text_of(whole) and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens == 12
    assert sum_of_input(final) == sum_of_input(whole)
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == [
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert set(kinds[2:-3]) == {"content_block_delta"}


def sum_of_input(message: anthropic.types.Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_sequence_is_named(claude: Anthropic, is_streamed: bool) -> None:
    text = text_of(claude.messages.create(**ASKED))
    stop = next(text[at : at + 2] for at in range(2, len(text) - 2) if text[at : at + 2] not in text[: at + 1])
    asked = {**ASKED, "stop_sequences": ["never said", stop]}
    if is_streamed:
        with claude.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = claude.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_that_must_be_used(claude: Anthropic, is_streamed: bool) -> None:
    if is_streamed:
        with claude.messages.stream(**WITH_TOOL) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_message()
        assert kinds.count("input_json") > 3
    else:
        message = claude.messages.create(**WITH_TOOL)
    (block,) = message.content
    assert block.type == "tool_use" and block.name == "sky" and block.id.startswith("toolu_")
    assert isinstance(block.input, dict) and block.input["days"] in (11, 22) and message.stop_reason == "tool_use"


def test_a_conversation_that_used_tools_is_the_one_in_openais_shape(claude: Anthropic, client: OpenAI) -> None:
    ours: list[Any] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "t1", "name": "sky", "input": {"days": 11}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "blue"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "sky", "arguments": '{"days": 11}'}}
    theirs: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": "So:", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "blue"},
        {"role": "user", "content": "And?"},
    ]
    message = claude.messages.create(**{**ASKED, "messages": ours})
    chat = client.chat.completions.create(model="tiny", messages=theirs, max_tokens=12, temperature=0)
    assert text_of(message) == chat.choices[0].message.content
    assert chat.usage is not None and sum_of_input(message) == chat.usage.prompt_tokens


def test_tokens_are_counted_as_they_are_used(claude: Anthropic) -> None:
    count = claude.messages.count_tokens(model="tiny", messages=MESSAGES, system="Be brief.", tools=[SKY])  # type: ignore[list-item]
    message = claude.messages.create(**ASKED, system="Be brief.", tools=[SKY])
    assert count.input_tokens == sum_of_input(message) > 50


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 100_000}, "effective context of 512"),
        ({"messages": []}, "messages"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "Well"}]}, "continuing it is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "is of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]}, "unknown field"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only tools of the caller's own"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "no tools are given"),
        ({"system": [{"type": "image"}]}, "system.0 is of type 'image'"),
        ({"system": [3]}, "system"),
        ({"stop_sequences": [""]}, "stop"),
        ({"metadata": {"user_id": "x" * 600}}, "user has 600 characters"),
        ({"nonsense": 1}, "unknown field 'nonsense'"),
    ],
)
def test_wrong_bodies_are_told_in_anthropics_shape(claude: Anthropic, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error") as caught:
        claude.messages.create(**BODY, extra_body={**COLD, **fields})
    body = caught.value.body
    assert isinstance(body, dict) and body["type"] == "error" and message in body["error"]["message"], body


def test_other_errors_have_that_shape_too(server: RunningServer, claude: Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.messages.create(**{**ASKED, "model": "other"})
    wrong = http.post("/v1/messages", content=b"{")
    assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/messages").json()["type"] == "error"
    assert http.post("/v1/messages/nothing", json={}).json()["error"]["type"] == "not_found_error"
    large = http.post("/v1/messages", json={**BODY, "system": "x" * 70_000})
    assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"


def test_a_stream_that_fails_ends_in_an_error_event(http: httpx.Client) -> None:
    # Greedy, since one that is sampled may end by itself first.
    body = {**BODY, **COLD, "max_tokens": 400, "stream": True, "metadata": {"user_id": "somebody"}}
    with http.stream("POST", "/v1/messages", json=body, headers={"x-request-id": "cut"}) as answer:
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            if line == "event: content_block_delta" and lines.count(line) == 1:
                assert http.post("/abort_requests", json={"request_ids": "cut"}).status_code == 200
    assert lines[-3] == "event: error" and json.loads(lines[-2].removeprefix("data: "))["type"] == "error"
