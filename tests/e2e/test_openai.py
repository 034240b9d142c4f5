"""The real `openai` client against a server of its own process: answers, streams, usage, cancellation, errors."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.support.running_server import RunningServer, wait_until

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a ropeway?"}]

PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7, "n": 3},
    {"temperature": 1.2, "seed": 8, "top_p": 0.8, "extra_body": {"top_k": 20, "min_p": 0.01}},
    {"temperature": 1, "seed": 9, "stop": ["a", "e", "\n"]},
    {"temperature": 1, "seed": 10, "presence_penalty": 1, "frequency_penalty": 0.5, "logit_bias": {"60": 5}},
    {"temperature": 1, "seed": 11, "extra_body": {"repetition_penalty": 1.3, "stop_token_ids": [50, 60, 70, 80]}},
    {"temperature": 0, "extra_body": {"ignore_eos": True, "min_tokens": 5}},
]


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_streamed_chat_is_unstreamed_chat(client: OpenAI, parameters: dict[str, Any]) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, **parameters}
    whole = client.chat.completions.create(**asked)
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    roles, usage = set(), None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles.add(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert roles == {"assistant", None}
    assert {choice.index: choice.message.content for choice in whole.choices} == texts
    assert {choice.index: choice.finish_reason for choice in whole.choices} == reasons
    assert whole.usage is not None and usage is not None and whole.usage.prompt_tokens > 20
    assert whole.usage.total_tokens == usage.total_tokens and whole.usage.completion_tokens == usage.completion_tokens
    details = usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    assert usage.prompt_tokens - 16 <= details.cached_tokens < usage.prompt_tokens, "the same prompt was not found"


def test_a_salt_hides_what_is_cached(client: OpenAI) -> None:
    def num_cached(salt: str | None) -> int | None:
        body = {} if salt is None else {"cache_salt": salt}
        prompt = [[7] * 40, [8] * 20]
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, extra_body=body)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [num_cached(salt) for salt in (None, None, "a", "b", "a", None)] == [0, 48, 0, 0, 48, 48]


@pytest.mark.parametrize("parameters", PARAMETERS)
def test_streamed_completions_are_unstreamed(client: OpenAI, parameters: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["one", "and another, longer prompt"],
        "max_tokens": 30,
        **parameters,
    }
    whole = client.completions.create(**asked)
    n = parameters.get("n", 1)
    assert [choice.index for choice in whole.choices] == list(range(2 * n))
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    for chunk in client.completions.create(**asked, stream=True):
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert {choice.index: choice.text for choice in whole.choices} == texts
    assert {choice.index: choice.finish_reason for choice in whole.choices} == reasons


def test_prompt_forms_agree(client: OpenAI) -> None:
    def texts(prompt: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=10, temperature=0)
        return [choice.text for choice in answer.choices]

    ids = [[10, 20, 30], [40, 50]]
    assert texts(ids) == texts(ids[0]) + texts(ids[1])
    assert texts(["ab", "cd"]) == texts("ab") + texts("cd")


def test_usage_counts_through_the_stop_string(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "count", "max_tokens": 60, "seed": 4, "temperature": 1}
    text = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[7:9]
    answer = client.completions.create(**asked, stop=stop, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens < 60
    (chunk,) = [
        chunk
        for chunk in client.completions.create(
            **asked, stop=stop, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
        )
        if chunk.usage
    ]
    assert chunk.usage == answer.usage and chunk.choices == []


def test_default_lengths(client: OpenAI) -> None:
    extra: Any = {"ignore_eos": True}
    short = client.completions.create(model="tiny", prompt="x", temperature=0, extra_body=extra)
    assert short.usage is not None and short.usage.completion_tokens == 16
    near_the_end = client.completions.create(model="tiny", prompt=[5] * 508, temperature=0, extra_body=extra)
    assert near_the_end.usage is not None and near_the_end.usage.completion_tokens == 4
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, extra_body=extra)
    assert whole.usage is not None and whole.usage.total_tokens == 512
    newer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=3, extra_body=extra
    )
    assert newer.usage is not None and newer.usage.completion_tokens == 3


def test_models(client: OpenAI, http: httpx.Client) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "lab/tiny:1"]
    assert models[0].model_dump()["max_model_len"] == 512
    assert client.models.retrieve("tiny").id == "tiny"
    assert http.get("/v1/models/lab/tiny:1").json()["id"] == "lab/tiny:1"
    assert http.get("/v1/models/lab%2Ftiny%3A1").json()["id"] == "lab/tiny:1"
    for name in ("tiny", "lab/tiny:1"):
        assert client.completions.create(model=name, prompt="x", max_tokens=1).model == name
    with pytest.raises(openai.NotFoundError, match="other") as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="is not served here; served: tiny, lab/tiny:1"):
        client.completions.create(model="gpt-4", prompt="x")


def test_model_may_be_omitted(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200 and answer.json()["model"] == "tiny"


def test_errors_carry_param_and_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", best_of=3)
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="512") as caught:
        client.completions.create(model="tiny", prompt=[5] * 500, max_tokens=20)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


def test_usage_in_every_chunk(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    for logprobs in (None, 1):  # chunks of text alone, and others, are written differently
        stream = client.completions.create(
            model="tiny", prompt="go", max_tokens=6, n=2, logprobs=logprobs, stream=True, stream_options=options
        )
        chunks = list(stream)
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert len(counts) == len(chunks) and counts == sorted(counts)
        assert counts[-1] == counts[-2] and 0 < counts[0] <= counts[-1]


def test_cancelling_a_stream_frees_the_blocks(client: OpenAI, server: RunningServer) -> None:
    num_aborted = server.metric('request_success_total{finished_reason="abort",model_name="tiny"}')
    stream = client.completions.create(
        model="tiny", prompt="go on", max_tokens=500, n=4, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.metric("kv_cache_usage_perc") > 0
    stream.close()
    wait_until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric('request_success_total{finished_reason="abort",model_name="tiny"}') == num_aborted + 4


def test_leaving_an_unstreamed_request_frees_the_blocks(server: RunningServer) -> None:
    body = {"prompt": "go on", "max_tokens": 500, "n": 8, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=httpx.Timeout(30, read=0.2)) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            impatient.post("/v1/completions", json=body)
    num_tokens = server.metric("generation_tokens_total")
    wait_until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("generation_tokens_total") - num_tokens < 8 * 400


def test_64_ragged_requests_at_once_equal_their_lone_answers(client: OpenAI, server: RunningServer) -> None:
    rng = random.Random(5)
    bodies: list[dict[str, Any]] = [
        {
            "model": "tiny",
            "prompt": [rng.randrange(3, 270) for _ in range(rng.randint(1, 120))],
            "max_tokens": rng.randint(1, 25),
            "temperature": number % 2,
            "seed": number,
        }
        for number in range(64)
    ]
    alone = [client.completions.create(**body).choices[0] for body in bodies]

    async def streamed(concurrent: AsyncOpenAI, body: dict[str, Any]) -> tuple[str, str]:
        text, reason = "", ""
        async for chunk in await concurrent.completions.create(**body, stream=True):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    async def together() -> list[tuple[str, str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as concurrent:
            return await asyncio.gather(*(streamed(concurrent, body) for body in bodies))

    assert asyncio.run(together()) == [(choice.text, choice.finish_reason) for choice in alone]
    assert server.metric("kv_cache_usage_perc") == 0


def test_metrics_tell_of_requests(client: OpenAI, server: RunningServer) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count",
             "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
             "request_queue_time_seconds_count")  # fmt: skip
    before = [server.metric(name) for name in names]
    client.completions.create(model="tiny", prompt=[5] * 9, max_tokens=7, extra_body={"ignore_eos": True})
    assert [server.metric(name) - old for name, old in zip(names, before, strict=True)] == [9, 7, 1, 6, 1, 1]
    assert server.metric("num_preemptions_total") == 0
    assert server.metric("recomputed_tokens_total") == 0


def test_metrics_tell_of_utilization(tiny_model_path: Path) -> None:
    """Only the native backend counts its calls and work."""
    flags = ("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--num-kv-blocks", "64", "--num-threads", "1")
    with RunningServer(tiny_model_path, *flags) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": [5] * 9, "max_tokens": 7}, timeout=60)
        assert 0 < server.metric("native_seconds_total") < server.metric("step_seconds_total")
        assert 0 < server.metric("engine_busy_ratio") <= 1
        assert 0 < server.metric("step_overhead_ratio") < 1
        assert server.metric("batch_occupancy_ratio") == 0
        assert server.metric("multiply_adds_total") > 0
        assert server.metric("interpreter_lock_wait_seconds_count") > 0
        wait_until(lambda: "machine_read_bytes_per_second" in httpx.get(f"{server.url}/metrics").text, timeout_s=60)
        assert server.metric("machine_read_bytes_per_second") > 1e8
        assert server.metric("memory_bandwidth_utilization_ratio") > 0


def test_operational_endpoints(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ping").status_code == 200
    assert http.get("/version").json()["version"]
    assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]
