"""A stream says what the whole answer says: for every pair of values of every two parameters, at every endpoint.

The application runs in this process on the native backend, whose bits do not depend on company, so log-probabilities
are compared exactly. Random text of a byte-level model has broken characters of its own; the grammars add whole ones
of two to four bytes, and stop strings that span tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.answers import streamed_answer, whole_answer
from support.api_bodies import PARAMETERS, SCHEMA, TOOL
from support.asgi_client import AsgiClient, running_app
from support.covering import covering_array
from support.random_gguf import RandomModel, write_random_gguf

Options = dict[str, list[dict[str, Any]]]

WIDE = "(é|🚡|日本|naïve ){4,12}"
SAMPLING: Options = {
    "temperature": [{"temperature": 0}, {"temperature": 1.1, "seed": 11}, {"temperature": 0.7, "seed": -5}],
    "filters": [{}, {"top_p": 0.9, "top_k": 40}, {"min_p": 0.01}],
    "n": [{}, {"n": 2}, {"n": 3}],
    "stop": [{}, {"stop": ["e", "🚡é", "日"]}, {"stop": "本🚡"}, {"stop_token_ids": [60, 97, 195]}],
    "stop text": [{}, {"include_stop_str_in_output": True}],
    "ids": [{}, {"return_token_ids": True}],
    "penalties": [{}, {"presence_penalty": 0.5, "frequency_penalty": 0.3}, {"repetition_penalty": 1.3}],
    "bias": [{}, {"logit_bias": {"60": 3, "195": 2, "240": 2}}],
    "bad words": [{}, {"bad_words": ["a", "é"]}],
    "least": [{}, {"min_tokens": 5}, {"ignore_eos": True}],
    "special": [{}, {"skip_special_tokens": False}],
    "cut": [{}, {"truncate_prompt_tokens": 7}, {"truncate_prompt_tokens": -1}],
    "prompt scores": [{}, {"prompt_logprobs": 0}, {"prompt_logprobs": 2}],
}
FORMS = [
    {},
    {"response_format": {"type": "json_object"}},
    {"response_format": SCHEMA},
    {"structured_outputs": {"regex": WIDE}},
    {"structured_outputs": {"choice": ["🚡🚡 né", "naïve 日本 é"]}},
]
NAMED = {"tool_choice": {"type": "function", "function": {"name": "sky"}}}
COMPLETIONS: Options = {
    **SAMPLING,
    "form": FORMS,
    "prompt": [{"prompt": "é🚡 日本?"}, {"prompt": [[5, 6, 195, 169, 240], [9] * 20]}, {"prompt": ["a", "ß" * 9]}],
    "length": [{"max_tokens": 14}, {"max_tokens": 5}],
    "echo": [{}, {"echo": True}],
    "logprobs": [{}, {"logprobs": 0}, {"logprobs": 4}],
}
CHAT: Options = {
    **SAMPLING,
    "form": [
        *FORMS,
        {"tools": [TOOL]},
        {"tools": [TOOL], "response_format": SCHEMA},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [TOOL], **NAMED},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
    "messages": [
        {"messages": [{"role": "user", "content": "Sky — é🚡 日本?"}]},
        {"messages": [{"role": "system", "content": "Kürze!"}, {"role": "user", "content": "a"}]},
    ],
    "length": [{"max_tokens": 60}, {"max_completion_tokens": 6}],
    "logprobs": [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}],
}
CLAUDE_TOOLS = {"tools": [{"name": "sky", "input_schema": PARAMETERS}]}
# No seed there: what decides is greedy, whatever the temperature.
MESSAGES: Options = {
    "model": [{"model": "tiny"}],
    "sampling": [{"temperature": 0}, {"temperature": 1, "top_k": 1}, {"temperature": 0.5, "top_p": 1e-9}],
    "stop": [{}, {"stop_sequences": ["e", "🚡é"]}, {"stop_sequences": ['{"d"']}, {"stop_sequences": ["\ufffd"]}],
    "system": [{}, {"system": "Kürze!"}, {"system": [{"type": "text", "text": "🚡"}]}],
    "tools": [
        {},
        CLAUDE_TOOLS,
        {**CLAUDE_TOOLS, "tool_choice": {"type": "any"}},
        {**CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "sky"}},
        {**CLAUDE_TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    ],
    "messages": CHAT["messages"][:1] + [{"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}]}],
    "length": [{"max_tokens": 70}, {"max_tokens": 6}, {"max_tokens": 1}],
}
EMOJI = {"type": "object", "properties": {"e": {"enum": ["🚡é", "日本"]}}, "required": ["e"]}
RESPONSES: Options = {
    "sampling": [{"temperature": 0}, {"temperature": 1, "top_p": 1e-9}],
    "instructions": [{}, {"instructions": "Kürze!"}],
    "input": [{"input": "Sky — é🚡?"}, {"input": [{"role": "user", "content": "a"}]}],
    "form": [
        {},
        {"text": {"format": {"type": "json_schema", "name": "e", "schema": EMOJI}}},
        {"tools": [{"type": "function", "name": "sky", "parameters": PARAMETERS}]},
        {"tools": [{"type": "function", "name": "sky", "parameters": PARAMETERS}], "tool_choice": "required"},
        {
            "tools": [{"type": "function", "name": "sky", "parameters": PARAMETERS}],
            "tool_choice": {"type": "function", "name": "sky"},
        },
    ],
    "store": [{}, {"store": False}],
    "length": [{"max_output_tokens": 70}, {"max_output_tokens": 6}],
}
ENDPOINTS: dict[str, Options] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


@asynccontextmanager
async def app_on(model: Path) -> AsyncIterator[AsgiClient]:
    async with running_app(
        model, num_kv_blocks=512, max_num_seqs=32, num_threads=1, served_model_name="tiny"
    ) as client:
        yield client


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", RandomModel(context_length=1024))


async def compare(client: AsgiClient, path: str, body: dict[str, Any], *, salt: str | None) -> bool:
    """Asks for the same whole and streamed; whether it was served. salt: what both find nothing cached under."""
    salted = [body if salt is None else {**body, "cache_salt": f"{salt}-{way}"} for way in ("whole", "streamed")]
    whole = await client.post(path, json.dumps(salted[0]).encode())
    options = {} if path in ("/v1/messages", "/v1/responses") else {"stream_options": {"include_usage": True}}
    stream = await client.post(path, json.dumps({**salted[1], "stream": True, **options}).encode())
    assert whole.status == stream.status, (body, whole, stream)
    said, streamed = whole_answer(path, whole.body), streamed_answer(path, stream.body)
    assert streamed == said, f"{path} {json.dumps(body)}\n{json.dumps(said)}\n{json.dumps(streamed)}"
    return whole.status == 200


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_pair_of_parameters(model: Path, path: str) -> None:
    options = ENDPOINTS[path]
    array = covering_array({name: range(len(values)) for name, values in options.items()})
    combinations = [[options[name][at] for name, at in chosen.items()] for chosen in array]

    async def run() -> int:
        async with app_on(model) as client:

            async def one(number: int, combination: list[dict[str, Any]]) -> bool:
                body = {name: value for fields in combination for name, value in fields.items()}
                if path in ("/v1/messages", "/v1/responses"):  # no salt there: the first of three fills the cache
                    await client.post(path, json.dumps(body).encode())
                    return await compare(client, path, body, salt=None)
                return await compare(client, path, body, salt=str(number))

            return sum(await asyncio.gather(*(one(*each) for each in enumerate(combinations))))

    num_served = asyncio.run(run())
    assert num_served == len(combinations)
