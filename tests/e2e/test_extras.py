"""Log-probabilities, echo and vLLM's token fields over HTTP: whole answers, streams, and their equality."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

MESSAGES: list[Any] = [{"role": "user", "content": "What is a ropeway?"}]


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices that a stream adds up to: text, lists, and what comes once."""
    choices: dict[int, dict[str, Any]] = {}
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    add(choices.setdefault(choice["index"], {}), choice)
    return choices


def add(total: dict[str, Any], news: dict[str, Any]) -> None:
    for name, value in news.items():
        if isinstance(value, dict):
            if total.get(name) is None:
                total[name] = {}
            add(total[name], value)
        elif isinstance(value, list) and isinstance(total.get(name), list):
            total[name] += value
        elif isinstance(value, str) and isinstance(total.get(name), str):
            total[name] += value
        elif value is not None or name not in total:
            total[name] = value


def approximately(value: Any) -> Any:
    """`value` with its floats matched to 1e-3: the numpy backend of these tests rounds with the shape of a batch."""
    match value:
        case float():
            return pytest.approx(value, abs=1e-3)
        case dict():
            return {key: approximately(each) for key, each in value.items()}
        case list():
            return [approximately(each) for each in value]
    return value


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.pop("message", None) or choice.pop("delta", None)
    if message is not None:
        choice["text"] = message["content"]
    if isinstance(choice.get("logprobs"), dict):
        choice["logprobs"].pop("refusal", None)
    return choice


EXTRAS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"logprobs": 0, "echo": True, "n": 2, "seed": 4},
    {"logprobs": 5, "echo": True, "max_tokens": 0},
    {"echo": True},
    {"echo": True, "stop": ["e", "t", "a"], "logprobs": 1, "include_stop_str_in_output": True},
    {"return_token_ids": True, "prompt_logprobs": 3, "n": 3, "seed": 5},
    {"return_token_ids": True, "logprobs": 1, "stop": ["xyz", "e"], "seed": 6},
    {"bad_words": ["a", "the"], "skip_special_tokens": False, "truncate_prompt_tokens": 3, "echo": True},
    {"logprobs": 3, "temperature": 0, "top_k": 3, "min_tokens": 4, "logit_bias": {"70": 4}},
]


@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: "+".join(extras))
def test_streamed_extras_are_unstreamed_ones(http: httpx.Client, extras: dict[str, Any]) -> None:
    body = {"prompt": ["one", "and another, longer prompt — é"], "max_tokens": 8, "temperature": 0.9, "seed": 1}
    body |= extras
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole = {choice["index"]: comparable(choice) for choice in answer.json()["choices"]}
    assert streamed(http, "/v1/completions", body) == approximately(whole)
    chat = {key: value for key, value in body.items() if key not in ("prompt", "echo", "logprobs")}
    chat |= {"messages": MESSAGES, "logprobs": True, "top_logprobs": extras.get("logprobs", 1)}
    whole = {
        choice["index"]: comparable(choice) for choice in http.post("/v1/chat/completions", json=chat).json()["choices"]
    }
    found = {number: comparable(choice) for number, choice in streamed(http, "/v1/chat/completions", chat).items()}
    assert found == approximately(whole)


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None and answer.usage is not None
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0 and entry.token == entry.top_logprobs[0].token
        assert len(entry.top_logprobs) == 3 and entry.bytes is not None
    data = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert data.decode(errors="replace").startswith(choice.message.content or "")


def test_completion_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=9, temperature=0, logprobs=2, echo=True)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None and answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert choice.text.startswith("abc")
    for token, offset, alternatives in zip(
        logprobs.tokens[1:], logprobs.text_offset[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert token in alternatives and len(alternatives) in (2, 3)
        if token.isascii() and not token.startswith(("bytes:", "<")):
            # Bytes of an unfinished character may stand before it: they become text together.
            assert token in choice.text[offset:][: len(token) + 1]


def test_as_evaluation_harnesses_ask(client: OpenAI) -> None:
    """Scores of a continuation: echo with log-probabilities, and nothing (or one token) generated."""
    context, continuation = list(range(20, 60)), [70, 71, 72]
    for max_tokens in (0, 1):
        answer = client.completions.create(
            model="tiny", prompt=[context + continuation], max_tokens=max_tokens, temperature=0, logprobs=1, echo=True
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and answer.usage is not None
        assert len(logprobs.token_logprobs) == 43 + max_tokens
        assert answer.usage.completion_tokens == max_tokens
        scored = logprobs.token_logprobs[40:43]
        free = client.completions.create(
            model="tiny", prompt=context, max_tokens=1, logprobs=0, extra_body={"logit_bias": {"70": 100}}
        )
        assert free.choices[0].logprobs is not None
        assert free.choices[0].logprobs.token_logprobs == approximately(scored[:1])


def test_token_fields(http: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 3, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    (choice,) = http.post("/v1/completions", json={**body, "prompt_logprobs": 1}).json()["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7, 8] and len(choice["token_ids"]) == 3
    first, *rest = choice["prompt_logprobs"]
    assert first is None and [next(iter(each)) for each in rest] == ["6", "7", "8"]
    assert all(each[key].keys() == {"logprob", "rank", "decoded_token"} for each in rest for key in each)
    (cut,) = http.post("/v1/completions", json={**body, "truncate_prompt_tokens": 2}).json()["choices"]
    assert cut["prompt_token_ids"] == [7, 8]
    (fits,) = http.post("/v1/completions", json={**body, "prompt": [5] * 600, "truncate_prompt_tokens": -1}).json()[
        "choices"
    ]
    assert len(fits["prompt_token_ids"]) == 512 - 3


@pytest.mark.parametrize("is_streamed", [False, True])
def test_chat_has_the_prompts_token_fields_beside_the_choices(http: httpx.Client, is_streamed: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "n": 2, "return_token_ids": True, "prompt_logprobs": 1}
    answer = http.post("/v1/chat/completions", json={**body, "ignore_eos": True, "stream": is_streamed})
    if is_streamed:
        found = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        found = [answer.json()]
    (told,) = [each for each in found if "prompt_token_ids" in each or "prompt_logprobs" in each]
    prompt_ids, scores = told["prompt_token_ids"], told["prompt_logprobs"]
    assert scores[0] is None and [next(iter(each)) for each in scores[1:]] == [str(each) for each in prompt_ids[1:]]
    choices = [choice for each in found for choice in each["choices"]]
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == 2 * 3
    assert all("prompt_token_ids" not in choice and "prompt_logprobs" not in choice for choice in choices)


@pytest.mark.parametrize(("num_tokens", "num_kept"), [(100, 100), (508, 508), (-1, 512 - 16)])
def test_a_prompt_that_is_cut_leaves_room_for_the_default_length(
    client: OpenAI, num_tokens: int, num_kept: int
) -> None:
    extras = {"truncate_prompt_tokens": num_tokens, "ignore_eos": True}
    answer = client.completions.create(model="tiny", prompt=[5] * 600, temperature=0, extra_body=extras)
    assert answer.usage is not None and answer.usage.prompt_tokens == num_kept
    assert answer.usage.completion_tokens == min(16, 512 - num_kept)


def test_wrong_extras_name_the_field(client: OpenAI) -> None:
    for extras in ({"truncate_prompt_tokens": 0}, {"prompt_logprobs": 21}, {"bad_words": [1]}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x", extra_body=extras)
        assert caught.value.param == next(iter(extras))
