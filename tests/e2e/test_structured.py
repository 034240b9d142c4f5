"""Structured output over HTTP with the real `openai` client."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

MESSAGES: list[Any] = [{"role": "user", "content": "Describe a lift."}]


class Lift(BaseModel):
    kind: Literal["gondola", "chair", "funicular"]
    cabins: int = Field(ge=1, le=99)
    stations: list[Literal["valley", "middle", "top"]] = Field(min_length=1, max_length=3)


@pytest.mark.parametrize("temperature", [0, 1])
def test_parsed_answers(client: OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Lift, temperature=temperature, n=3, seed=4
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Lift)


def test_streamed_json_is_unstreamed_json(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "temperature": 1, "seed": 9, "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"name": "lift", "strict": True,
                                                                   "schema": Lift.model_json_schema()}},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    Lift.model_validate_json(whole.choices[0].message.content or "")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(choice.delta.content or "" for choice in chunks) == whole.choices[0].message.content
    assert chunks[-1].finish_reason == "stop"


def test_a_json_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=1, seed=2, max_tokens=40, response_format={"type": "json_object"}
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        json.loads(text)


def test_a_json_object_with_a_schema_follows_it(client: OpenAI) -> None:
    form: Any = {"type": "json_object", "schema": {**Lift.model_json_schema(), "additionalProperties": False}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=1, seed=2, max_tokens=300, response_format=form
    )
    Lift.model_validate_json(answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"regex": "[a-f]{4}"}, "[a-f]{4}"),
        ({"choice": ["up", "down"]}, "up|down"),
        ({"grammar": 'start: "<" NAME ">"\nNAME: /[a-z]{2}/'}, "<[a-z]{2}>"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 5}}, "[345]"),
    ],
)
def test_structured_outputs(client: OpenAI, options: dict[str, Any], fits: str) -> None:
    answer = client.completions.create(
        model="tiny", prompt="x", temperature=1, seed=1, extra_body={"structured_outputs": options}
    )
    assert re.fullmatch(fits, answer.choices[0].text) and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "not": {}}}}},
            "'not'",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}}, "'type'"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "json_schema.schema is required"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "'xml'"),
        ({"response_format": {"type": ["text"]}}, "type must be"),
        ({"response_format": {"type": "text", "schema": {}}}, "unknown field 'schema'"),
        ({"response_format": {"type": "json_object", "schmea": {}}}, "unknown field 'schmea'"),
        ({"response_format": {"type": "json_object", "schema": {"type": "string", "not": {}}}}, "'not'"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "it holds type and json_schema"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "look-ahead"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "missing"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one of"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "give one"),
    ],
)
def test_wrong_schemas_are_400_and_named(http: httpx.Client, body: dict[str, Any], named: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] in body and named in error["message"], error


def test_text_asks_for_nothing(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 5}
    plain = client.chat.completions.create(**asked)
    as_text = client.chat.completions.create(**asked, response_format={"type": "text"})
    assert as_text.choices == plain.choices
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(**asked, response_format={"type": "json"})  # type: ignore[call-overload]
