"""Bodies of requests: every field is served, inert, refused by name, or unknown; nothing is ignored in silence."""

from __future__ import annotations

import pytest

from ropeway.core.params import SamplingParams, ServiceTerms
from ropeway.errors import InvalidRequestError, RequestTooLargeError, UnsupportedFieldError
from ropeway.server.protocol import (
    INERT_FIELDS,
    REFUSED_CHAT_FIELDS,
    REFUSED_COMPLETION_FIELDS,
    ChatBody,
    CompletionBody,
    parse_body,
)

PROMPT = {"prompt": "x"}
MESSAGES = {"messages": [{"role": "user", "content": "x"}]}


def completion(**fields: object) -> CompletionBody:
    return parse_body(CompletionBody, {**PROMPT, **fields}, REFUSED_COMPLETION_FIELDS)


def chat(**fields: object) -> ChatBody:
    return parse_body(ChatBody, {**MESSAGES, **fields}, REFUSED_CHAT_FIELDS)


def test_nothing_given_is_the_default() -> None:
    assert completion().sampling_params(16) == SamplingParams()
    nulls = dict.fromkeys(set(CompletionBody.model_fields) - {"prompt"})
    assert completion(**nulls).sampling_params(16) == SamplingParams()


def test_everything_given_arrives() -> None:
    fields = {
        "n": 2, "min_tokens": 1, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "stop": ["a", "b"],
        "stop_token_ids": [4], "ignore_eos": True, "bad_words": ["x"], "include_stop_str_in_output": True,
        "skip_special_tokens": False, "prompt_logprobs": 2,
    }  # fmt: skip
    params = completion(**fields, logit_bias={"12": -3}, max_tokens=9).sampling_params(9)
    assert params == SamplingParams(**fields, logit_bias={12: -3.0}, max_tokens=9)  # type: ignore[arg-type]


def test_the_terms_of_service_arrive() -> None:
    assert completion().service_terms() == ServiceTerms()
    body = chat(priority=-3, user="ada", cache_salt="sea")
    assert body.service_terms() == ServiceTerms(priority=-3, user="ada", cache_salt="sea")
    with pytest.raises(InvalidRequestError, match="priority must be from -1000 to 1000, not 1001"):
        chat(priority=1001).service_terms()
    with pytest.raises(InvalidRequestError, match="user has 600 characters; at most 512"):
        chat(user="u" * 600).service_terms()


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_all(top_k: int) -> None:
    assert completion(top_k=top_k).sampling_params(1).top_k == 0


@pytest.mark.parametrize("name", sorted(INERT_FIELDS))
def test_inert_fields_are_accepted(name: str) -> None:
    completion(**{name: "anything"})
    chat(**{name: {"any": "thing"}})


@pytest.mark.parametrize("name", sorted(REFUSED_COMPLETION_FIELDS))
def test_completions_refuse_by_name(name: str) -> None:
    for neutral in (None, *REFUSED_COMPLETION_FIELDS[name]):
        completion(**{name: neutral})
    with pytest.raises(UnsupportedFieldError, match=name) as caught:
        completion(**{name: 77})
    assert caught.value.param == name


@pytest.mark.parametrize("name", sorted(REFUSED_CHAT_FIELDS))
def test_chat_refuses_by_name(name: str) -> None:
    for neutral in (None, *REFUSED_CHAT_FIELDS[name]):
        chat(**{name: neutral})
    with pytest.raises(UnsupportedFieldError, match=name) as caught:
        chat(**{name: "something"})
    assert caught.value.param == name


def test_neutral_values_are_not_confused_with_equal_ones() -> None:
    with pytest.raises(UnsupportedFieldError):
        completion(best_of=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"echo": 1}, "echo"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {"١": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True, "x": 1}}, "stream_options"),
        ({"stream_options": True}, "stream_options"),
        ({"model": 5}, "model"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_wrong_values_name_the_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        body = completion(**fields)
        body.sampling_params(body.max_tokens)
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(InvalidRequestError, match="JSON object"):
        parse_body(CompletionBody, body, REFUSED_COMPLETION_FIELDS)


def test_prompts_in_their_four_forms() -> None:
    assert completion(prompt="a").prompts() == ["a"]
    assert completion(prompt=["a", "b"]).prompts() == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts() == [[1, 2]]
    assert completion(prompt=[[1, 2], [3]]).prompts() == [[1, 2], [3]]


@pytest.mark.parametrize("prompt", [[], None, 5, {"a": 1}, [1, "a"], ["a", [1]], [True], [1.5], [None]])
def test_wrong_prompts(prompt: object) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        completion(prompt=prompt).prompts()


def test_required_fields() -> None:
    with pytest.raises(InvalidRequestError, match="prompt is required"):
        parse_body(CompletionBody, {}, REFUSED_COMPLETION_FIELDS)
    with pytest.raises(InvalidRequestError, match="messages is required"):
        parse_body(ChatBody, {}, REFUSED_CHAT_FIELDS)


def test_max_completion_tokens() -> None:
    assert chat().num_tokens_asked is None
    assert chat(max_tokens=5).num_tokens_asked == 5
    assert chat(max_completion_tokens=6).num_tokens_asked == 6
    assert chat(max_completion_tokens=6, max_tokens=6).num_tokens_asked == 6
    with pytest.raises(InvalidRequestError, match="give one"):
        assert chat(max_completion_tokens=6, max_tokens=5).num_tokens_asked


def test_an_error_names_the_field_that_was_sent() -> None:
    error = RequestTooLargeError("max_tokens is 6, not min_tokens", param="max_tokens")
    told = chat(max_completion_tokens=6).as_given(error)
    assert type(told) is RequestTooLargeError and told.param == "max_completion_tokens"
    assert str(told) == "max_completion_tokens is 6, not min_tokens"
    for body in (chat(max_tokens=6), chat(max_tokens=6, max_completion_tokens=6), chat()):
        assert body.as_given(error) is error


def test_messages_become_plain() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "bob"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "user", "content": ""},
    ]
    assert chat(messages=messages).conversation() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "bob"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "content": "x"},
        {"role": "user"},
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"text": "x"}]},
        {"role": "user", "content": "x", "mood": "good"},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        "x",
        None,
    ],
)
def test_wrong_messages(message: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(messages=[message]).conversation()
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("given", "asked"), [({}, None), ({"logprobs": False}, None), ({"logprobs": 0}, 0), ({"logprobs": 5}, 5)]
)
def test_logprobs_of_completions(given: dict[str, object], asked: int | None) -> None:
    params = completion(**given).sampling_params(1)
    assert (params.logprobs, params.prompt_logprobs) == (asked, None)
    echoing = completion(**given, echo=True, prompt_logprobs=2).sampling_params(1)
    assert echoing.prompt_logprobs == max(2, asked or 0)


def test_logprobs_of_chat() -> None:
    assert chat().sampling_params(1).logprobs is None
    assert chat(logprobs=False, top_logprobs=0).sampling_params(1).logprobs is None
    assert chat(logprobs=True).sampling_params(1).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling_params(1).logprobs == 20
    for wrong in ({"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        with pytest.raises(InvalidRequestError, match="top_logprobs") as caught:
            chat(**wrong).sampling_params(1)
        assert caught.value.param == "top_logprobs"


def test_what_the_model_advises_stands_where_nothing_is_given() -> None:
    advised = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    params = completion(top_k=-1, temperature=0.0).sampling_params(1, advised)
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 0.95)


def test_no_messages() -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        chat(messages=[])


def test_usage_in_every_chunk_needs_usage_at_all() -> None:
    assert not completion(stream=True).repeats_usage
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    assert completion(stream=True, stream_options=options).repeats_usage
    with pytest.raises(InvalidRequestError, match="include_usage") as caught:
        assert chat(stream=True, stream_options={"continuous_usage_stats": True}).repeats_usage
    assert caught.value.param == "stream_options"
