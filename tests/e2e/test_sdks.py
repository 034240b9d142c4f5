"""What the `openai` and `anthropic` packages do beyond one call: helpers, parsing, async clients, typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from tests.e2e.conftest import ENGINE_FLAGS
from tests.support.running_server import RunningServer, wait_until

MESSAGES: list[Any] = [{"role": "user", "content": "Sky?"}]


class Sky(BaseModel):
    """Days."""

    days: Literal[11, 22]


def test_the_stream_helper_parses_what_it_adds_up(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Sky, temperature=1, seed=4, max_tokens=60
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and kinds[-1] == "content.done"
    assert isinstance(final.choices[0].message.parsed, Sky) and final.choices[0].finish_reason == "stop"


def test_the_stream_helper_parses_arguments(client: OpenAI) -> None:
    tool = openai.pydantic_function_tool(Sky)
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False,
        temperature=1, seed=3, max_tokens=90, extra_body={"truncate_prompt_tokens": 300},
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert call.function.name == "Sky" and isinstance(call.function.parsed_arguments, Sky)


def test_a_response_is_parsed(client: OpenAI) -> None:
    response = client.responses.parse(model="tiny", input="Sky?", text_format=Sky, temperature=1, max_output_tokens=60)
    assert isinstance(response.output_parsed, Sky)
    with client.responses.stream(
        model="tiny", input="Sky?", text_format=Sky, temperature=1, max_output_tokens=60
    ) as stream:
        assert stream.until_done().get_final_response().output_parsed is not None


def test_async_clients(server: RunningServer) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}

    async def run() -> None:
        async with (
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as gpt,
            AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
        ):
            async with claude.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
                text = "".join([part async for part in stream.text_stream])
            stream = await gpt.chat.completions.create(**asked, temperature=0, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text

    asyncio.run(run())


@pytest.fixture(scope="module")
def guarded(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text('{"sk-one": {"tenant": "a", "requests_per_min": 2}, "sk-many": {"tenant": "b"}}')
    flags = (*ENGINE_FLAGS, "--api-key-file", str(keys), "--admin-api-key", "sk-admin", "--max-num-queued-reqs", "1")
    flags = (*flags, "--max-num-seqs", "1")  # one runs, one waits, the next is refused
    with RunningServer(tiny_model_path, *flags, "--served-model-name", "tiny") as running:
        yield running


ERRORS: list[tuple[str, dict[str, Any], int, type[Exception], type[Exception]]] = [
    ("sk-none", {}, 401, openai.AuthenticationError, anthropic.AuthenticationError),
    ("sk-many", {"temperature": -1}, 400, openai.BadRequestError, anthropic.BadRequestError),
    ("sk-many", {"nonsense": 1}, 400, openai.BadRequestError, anthropic.BadRequestError),
    ("sk-many", {"model": "gpt-9"}, 404, openai.NotFoundError, anthropic.NotFoundError),
]


@pytest.mark.parametrize(("key", "fields", "status", "of_openai", "of_anthropic"), ERRORS)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_errors_have_their_types(
    guarded: RunningServer,
    key: str,
    fields: dict[str, Any],
    status: int,
    of_openai: type[Exception],
    of_anthropic: type[Exception],
    is_streamed: bool,
) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "extra_body": fields}
    with (
        OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as gpt,
        pytest.raises(of_openai) as caught,
    ):
        gpt.chat.completions.create(**body, stream=is_streamed)
    assert isinstance(caught.value, openai.APIStatusError) and caught.value.status_code == status
    assert caught.value.code and caught.value.request_id
    with (
        Anthropic(base_url=guarded.url, api_key=key, max_retries=0) as claude,
        pytest.raises(of_anthropic) as caught,
    ):
        claude.messages.create(**body, stream=is_streamed)
    assert isinstance(caught.value, anthropic.APIStatusError) and caught.value.status_code == status
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"]  # type: ignore[index, call-overload]


def test_a_rate_is_429_and_a_full_queue_503(guarded: RunningServer) -> None:
    with (
        OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-one", max_retries=0) as few,
        Anthropic(base_url=guarded.url, api_key="sk-one", max_retries=0) as few_too,
        OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-many", max_retries=0) as many,
        Anthropic(base_url=guarded.url, api_key="sk-many", max_retries=0) as many_too,
    ):
        asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
        few.chat.completions.create(**asked)
        few_too.messages.create(**asked)
        for ask, kind in (
            (few.chat.completions.create, openai.RateLimitError),
            (few_too.messages.create, anthropic.RateLimitError),
        ):
            with pytest.raises(kind) as caught:
                ask(**asked)
            assert int(caught.value.response.headers["retry-after"]) >= 1  # type: ignore[attr-defined]
        long: dict[str, Any] = {"model": "tiny", "prompt": "go on", "max_tokens": 400, "n": 32}
        hold = [many.completions.create(**long, stream=True, extra_body={"ignore_eos": True}) for _ in range(2)]
        for ask, kind in (
            (many.chat.completions.create, openai.InternalServerError),
            (many_too.messages.create, anthropic.InternalServerError),
        ):
            with pytest.raises(kind) as caught:
                ask(**asked)
            assert caught.value.status_code == 503  # type: ignore[attr-defined]
            assert int(caught.value.response.headers["retry-after"]) >= 1  # type: ignore[attr-defined]
        for stream in hold:
            stream.close()
    wait_until(lambda: guarded.metric("num_requests_running") == 0)
