"""Bodies that every POST endpoint accepts: a plain one of each, and fields with values that may be added to it.

A random model of at least 1024 tokens of context answers all of them with 200, but those that name what is not there.
UPLOAD is the form of a file. Knows no HTTP and no server.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]

USER: Body = {"role": "user", "content": "Sky? — é🚡"}
PARAMETERS: Body = {
    "type": "object",
    "properties": {"d": {"enum": [1, 2]}},
    "required": ["d"],
    "additionalProperties": False,
}
TOOL: Body = {"type": "function", "function": {"name": "sky", "description": "Days.", "parameters": PARAMETERS}}
SCHEMA: Body = {"type": "json_schema", "json_schema": {"name": "day", "strict": True, "schema": PARAMETERS}}
CALL: Body = {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": '{"d": 1}'}}

SAMPLING: list[Body] = [
    {"temperature": 0},
    {"temperature": 1.3, "seed": 5},
    {"top_p": 0.5, "top_k": 7, "min_p": 0.02},
    {"n": 2, "seed": -3},
    {"stop": "e"},
    {"stop": ["\n", "é", "ab"], "include_stop_str_in_output": True},
    {"stop_token_ids": [40, 41, 42]},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
    {"logit_bias": {"60": 5, "61": -100}},
    {"min_tokens": 2, "ignore_eos": True},
    {"bad_words": ["the", "a b"]},
    {"skip_special_tokens": False},
    {"prompt_logprobs": 2},
    {"return_token_ids": True},
    {"truncate_prompt_tokens": 30},
    {"truncate_prompt_tokens": -1},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"user": "me", "cache_salt": "s", "priority": 0},
    {"timeout": 600, "queue_timeout": 600.0},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": SCHEMA},
    {"structured_outputs": {"regex": "[ab]{1,3}"}},
    {"structured_outputs": {"choice": ["yes", "né"]}},
    {"structured_outputs": {"json": PARAMETERS}},
    {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    {"metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
]
MODEL: Body = {"model": "tiny"}
UPLOAD = {
    "purpose": "batch",
    "file": '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "é"}}\n',
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A POST path, a body that it accepts, and groups of fields, each of which may be added to the body."""

    path: str
    base: Body | None
    extras: Sequence[Mapping[str, Any]] = ()
    # Pairs of fields that exclude each other: of them a valid body holds one.
    exclusive: Sequence[frozenset[str]] = field(default_factory=tuple)


_FORMS = frozenset({"response_format", "structured_outputs", "tool_choice"})

ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "/v1/completions",
        {"prompt": "Sky", "max_tokens": 3},
        [
            *SAMPLING,
            MODEL,
            {"prompt": ["one", "twö"]},
            {"prompt": [5, 6, 7]},
            {"prompt": [[5, 6], [7]]},
            {"max_tokens": 0, "echo": True},
            {"echo": True},
            {"logprobs": 0},
            {"logprobs": 5, "echo": True},
        ],
        [_FORMS, frozenset({"max_tokens", "min_tokens"}), frozenset({"max_tokens", "response_format"})],
    ),
    Endpoint(
        "/v1/chat/completions",
        {"messages": [USER], "max_tokens": 3},
        [
            *SAMPLING,
            MODEL,
            {"messages": [{"role": "system", "content": "Be brief."}, USER]},
            {"messages": [{"role": "developer", "content": "x"}, {**USER, "name": "me"}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "1"},
                ]
            },
            {"max_completion_tokens": 3},
            {"logprobs": True, "top_logprobs": 4},
            {"logprobs": False},
            {"tools": [TOOL]},
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sky"}}},
            {"tools": [TOOL], "tool_choice": "none"},
        ],
        [_FORMS],
    ),
    Endpoint(
        "/v1/messages",
        {"model": "tiny", "max_tokens": 3, "messages": [USER]},
        [
            {"temperature": 0.5, "top_k": 5, "top_p": 0.9},
            {"stop_sequences": ["e", "🚡"]},
            {"stream": True},
            {"system": "Be brief."},
            {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {"metadata": {"user_id": "me"}},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}]},
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "sky", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]},
                ]
            },
            {"tools": [{"name": "sky", "input_schema": PARAMETERS}]},
            {"tools": [{"name": "sky", "input_schema": PARAMETERS}], "tool_choice": {"type": "any"}},
            {"thinking": {"type": "disabled"}},
        ],
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        {"model": "tiny", "messages": [USER]},
        [{"system": "x"}, {"tools": [{"name": "sky", "input_schema": PARAMETERS}]}],
    ),
    Endpoint(
        "/v1/responses",
        {"input": "Sky?", "max_output_tokens": 3},
        [
            MODEL,
            {"input": [USER]},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "é"}]}]},
            {
                "input": [
                    USER,
                    {"type": "function_call", "call_id": "c1", "name": "sky", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": "1"},
                ]
            },
            {"instructions": "Be brief."},
            {"store": False},
            {"stream": True},
            {"background": True},
            {"temperature": 0.7, "top_p": 0.8},
            {"text": {"format": {"type": "text"}}},
            {"text": {"format": {"type": "json_schema", "name": "day", "schema": PARAMETERS, "strict": True}}},
            {"tools": [{"type": "function", "name": "sky", "parameters": PARAMETERS}]},
            {"metadata": {"a": "b"}, "user": "me", "truncation": "disabled"},
        ],
        [frozenset({"background", "stream"}), frozenset({"background", "store"})],
    ),
    Endpoint(
        "/tokenize",
        {"prompt": "Sky — é🚡"},
        [MODEL, {"add_special_tokens": False}, {"return_token_strs": True}],
    ),
    Endpoint("/tokenize", {"messages": [USER]}, [{"tools": [TOOL]}, {"return_token_strs": True}]),
    Endpoint("/detokenize", {"tokens": [40, 41, 300]}, [MODEL]),
    Endpoint("/abort_requests", {"request_ids": ["cmpl-none"]}, [{"request_ids": "x"}, {"abort_all": False}]),
    Endpoint(
        "/v1/batches",
        {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"},
        [{"endpoint": "/v1/chat/completions"}, {"metadata": {"a": "b"}}],
    ),
    Endpoint("/v1/batches/batch_none/cancel", None),
    Endpoint("/v1/responses/resp_none/cancel", None),
    Endpoint("/pause", None),
    Endpoint("/resume", None),
]


def valid_body(rng: random.Random, endpoint: Endpoint, most_extras: int = 3) -> Body:
    """The endpoint's body with up to so many groups of fields, of which none excludes another."""
    body = dict(endpoint.base or {})
    added: set[str] = set()
    for _ in range(rng.randint(0, most_extras) if endpoint.extras else 0):
        extra = rng.choice(endpoint.extras)
        names = added | extra.keys()
        if added & extra.keys() or any(len(names & group) > 1 for group in endpoint.exclusive):
            continue
        body |= extra
        added |= extra.keys()
    return body
