"""Usage counts what the engine computed for the answer, by every path: against token ids, the engine's counters, and
the rule of what ends an answer. In this process, whole and streamed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from support.answers import Said, streamed_answer, whole_answer
from support.api_bodies import PARAMETERS, TOOL
from support.asgi_client import AsgiClient, running_app
from support.random_gguf import RandomModel, write_random_gguf

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Sky — é🚡 日本?"}], "temperature": 1, "seed": 3}
LONG: dict[str, Any] = {"prompt": [7] * 100, "max_tokens": 6, "temperature": 1, "seed": 3}

CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {**LONG}),
    (COMPLETIONS, {**LONG, "echo": True}),
    (COMPLETIONS, {**LONG, "echo": True, "max_tokens": 0, "logprobs": 1}),
    (COMPLETIONS, {**LONG, "echo": True, "logprobs": 1, "n": 2}),
    (COMPLETIONS, {**LONG, "prompt": ["a", "日本 🚡", "b" * 40], "n": 3}),
    (COMPLETIONS, {**LONG, "truncate_prompt_tokens": 9}),
    (COMPLETIONS, {**LONG, "prompt_logprobs": 1}),
    (COMPLETIONS, {**LONG, "max_tokens": 60, "min_tokens": 20, "stop_token_ids": list(range(60, 120))}),
    (CHAT, {**HI, "max_tokens": 9}),
    (CHAT, {**HI, "n": 3, "max_tokens": 9, "logprobs": True}),
    (CHAT, {**HI, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}),
    (CHAT, {**HI, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False}),
    (CHAT, {**HI, "structured_outputs": {"regex": "(🚡|é){9}"}, "max_tokens": 60}),
    (CHAT, {**HI, "structured_outputs": {"choice": ["日本 é"]}, "max_tokens": 60, "n": 2}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", RandomModel(context_length=1024))


def on_app(model: Path, run: Callable[[AsgiClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running_app(
            model, num_kv_blocks=512, max_num_seqs=32, num_threads=1, served_model_name="tiny"
        ) as client:
            await run(client)

    asyncio.run(main())


async def said(client: AsgiClient, path: str, body: dict[str, Any], *, is_streamed: bool) -> Said:
    if not is_streamed:
        return whole_answer(path, (await client.post(path, json.dumps(body).encode())).body)
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    return streamed_answer(path, (await client.post(path, json.dumps(body).encode())).body)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_it_is_the_number_of_token_ids_and_what_the_engine_counted(model: Path, is_streamed: bool) -> None:
    async def run(client: AsgiClient) -> None:
        for path, body in CASES:
            before = client.llm.engine.stats
            found = await said(client, path, {**body, "return_token_ids": True}, is_streamed=is_streamed)
            after, usage = client.llm.engine.stats, found["usage"]
            choices = found["choices"].values()
            n = body.get("n", 1)
            assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices), body
            num_told, told = (1, [found]) if path == CHAT else (n, choices)
            assert usage["prompt_tokens"] * num_told == sum(len(each["prompt_token_ids"]) for each in told), body
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            if "max_tokens" in body and body["max_tokens"] > 0:
                assert usage["completion_tokens"] == after.num_generation_tokens - before.num_generation_tokens, body
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if n == 1:
                assert cached == after.num_prefix_hits - before.num_prefix_hits, body
            plain = await said(client, path, body, is_streamed=is_streamed)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert plain["usage"][name] == usage[name], "it does not depend on what is shown"

    on_app(model, run)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_is_counted_through_its_last_token(model: Path, is_streamed: bool) -> None:
    body = {**HI, "structured_outputs": {"regex": "(🚡|é|日){40}"}, "max_tokens": 150, "return_token_ids": True}

    async def run(client: AsgiClient) -> None:
        for stop in ("é", "🚡🚡", "日é", "é日🚡"):
            found = await said(client, CHAT, {**body, "stop": stop}, is_streamed=is_streamed)
            (choice,), usage = found["choices"].values(), found["usage"]
            if choice["finish_reason"] != "stop" or usage["completion_tokens"] >= 120:
                continue  # the text ended without it
            ids = choice["token_ids"]
            decode = client.llm.builder.tokenizer.decode
            assert stop in decode(ids) and stop not in decode(ids[:-1]), stop
            assert usage["completion_tokens"] == len(ids) and choice["text"] == decode(ids).split(stop)[0]
            seen.add(stop)

    seen: set[str] = set()
    on_app(model, run)
    assert len(seen) >= 2


def test_cached_tokens_are_the_whole_blocks_that_were_found(model: Path) -> None:
    async def run(client: AsgiClient) -> None:
        for number, expected in enumerate((0, 96, 96)):
            found = await said(client, COMPLETIONS, LONG, is_streamed=number == 2)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        scored = await said(client, COMPLETIONS, {**LONG, "echo": True, "logprobs": 1}, is_streamed=False)
        assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # its scores need it computed

    on_app(model, run)


def test_an_aborted_answer_is_counted_as_far_as_it_was_told(model: Path) -> None:
    async def run(client: AsgiClient) -> None:
        body = {**LONG, "max_tokens": 900, "ignore_eos": True, "return_token_ids": True}
        stream = asyncio.create_task(said(client, COMPLETIONS, body, is_streamed=True))
        while client.llm.engine.stats.num_generation_tokens < 5:
            await asyncio.sleep(0.001)
        aborted = json.loads((await client.post("/abort_requests", b'{"abort_all": true}')).body)["aborted"]
        found = await stream
        (choice,) = found["choices"].values()
        num_tokens = found["usage"]["completion_tokens"]
        assert choice["finish_reason"] == "abort" and 5 <= num_tokens < 900
        assert num_tokens == len(choice["token_ids"])
        told = json.loads((await client.get(f"/v1/requests/{aborted[0]}")).body)
        assert told["state"] == "aborted" and told["usage"]["completion_tokens"] == num_tokens
        assert told["usage"]["prompt_tokens"] == 100

    on_app(model, run)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_all_endpoints_count_alike(model: Path, is_streamed: bool) -> None:
    tool = {"name": "sky", "description": "Days.", "parameters": PARAMETERS}
    forced = {"type": "function", "function": {"name": "sky"}}

    async def run(client: AsgiClient) -> None:
        for tools in (False, True):
            cold = {"model": "tiny", "temperature": 0}
            messages = {"messages": HI["messages"]}
            chat = {**cold, **messages, "max_tokens": 90}
            claude: dict[str, Any] = dict(chat)
            response: dict[str, Any] = {**cold, "input": HI["messages"], "max_output_tokens": 90}
            if tools:
                chat |= {"tools": [{"type": "function", "function": tool}], "tool_choice": forced}
                schema = {"name": "sky", "description": "Days.", "input_schema": PARAMETERS}
                claude |= {"tools": [schema], "tool_choice": {"type": "tool", "name": "sky"}}
                response |= {
                    "tools": [{"type": "function", **tool}],
                    "tool_choice": {"type": "function", "name": "sky"},
                }
            usage = (await said(client, CHAT, chat, is_streamed=is_streamed))["usage"]
            by_claude = await ask(client, "/v1/messages", claude, is_streamed)
            by_response = await ask(client, "/v1/responses", response, is_streamed)
            count = {name: value for name, value in claude.items() if name not in ("max_tokens", "temperature")}
            counted = json.loads((await client.post("/v1/messages/count_tokens", json.dumps(count).encode())).body)
            assert counted["input_tokens"] == usage["prompt_tokens"]
            num_input = by_claude["usage"]["input_tokens"] + by_claude["usage"]["cache_read_input_tokens"]
            assert (num_input, by_claude["usage"]["output_tokens"]) == (
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
            assert by_response["usage"]["input_tokens"] == usage["prompt_tokens"]
            assert by_response["usage"]["output_tokens"] == usage["completion_tokens"]
            assert by_response["usage"]["total_tokens"] == usage["total_tokens"]

    on_app(model, run)


async def ask(client: AsgiClient, path: str, body: dict[str, Any], is_streamed: bool) -> Said:
    answer = await client.post(path, json.dumps({**body, "stream": is_streamed}).encode())
    return streamed_answer(path, answer.body) if is_streamed else whole_answer(path, answer.body)
