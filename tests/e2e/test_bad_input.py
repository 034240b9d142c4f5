"""Whatever is sent, the answer is a typed error in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.running_server import RunningServer

P = {"prompt": "x"}
M = {"messages": [{"role": "user", "content": "x"}]}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

BODIES: list[tuple[str, Any, int, str | None]] = [
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, [], 400, None),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [320]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 512}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 500, "max_tokens": 13}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 100}, 400, "prompt"),
    (COMPLETIONS, {**P, "max_tokens": -1}, 400, "max_tokens"),
    (COMPLETIONS, {**P, "max_tokens": 10**30}, 400, "max_tokens"),
    (COMPLETIONS, {**P, "temperature": -0.5}, 400, "temperature"),
    (COMPLETIONS, {**P, "top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {**P, "logprobs": 6}, 400, "logprobs"),
    (COMPLETIONS, {**P, "echo": "yes"}, 400, "echo"),
    (COMPLETIONS, {**P, "suffix": "y"}, 400, "suffix"),
    (COMPLETIONS, {**P, "best_of": 3}, 400, "best_of"),
    (COMPLETIONS, {**P, "max_tokns": 5}, 400, "max_tokns"),
    (COMPLETIONS, {**P, "stop_token_ids": [99999]}, 400, "stop_token_ids"),
    (COMPLETIONS, {**P, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {**P, "model": "other"}, 404, None),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
    (CHAT, {**M, "tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools"),
    (CHAT, {**M, "response_format": {"type": "xml"}}, 400, "response_format"),
    (CHAT, {**M, "prompt": "x"}, 400, "prompt"),
    (CHAT, {**M, "max_tokens": 600}, 400, "max_tokens"),
    (CHAT, {**M, "max_completion_tokens": 600}, 400, "max_completion_tokens"),
    (CHAT, {**M, "max_completion_tokens": -1}, 400, "max_completion_tokens"),
    (CHAT, {**M, "max_completion_tokens": 5, "max_tokens": 6}, 400, "max_tokens"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies(http: httpx.Client, path: str, body: Any, status: int, param: str | None, stream: bool) -> None:
    if stream and isinstance(body, dict):
        body = {**body, "stream": True}
    answer = http.post(path, json=body)
    check_error(answer, status, param)


def test_stream_options_without_a_stream(http: httpx.Client) -> None:
    body = {**P, "stream_options": {"include_usage": True}}
    check_error(http.post(COMPLETIONS, json=body), 400, "stream_options")


RAW = [
    (b"", 400),
    (b"{", 400),
    (b"nonsense", 400),
    (b'{"prompt": "x", "temperature": NaN}', 400),
    (b'{"prompt": "x", "temperature": 1e999}', 400),
    (b'{"prompt": "\xff\xfe"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b"[" * 5000, 400),
    (b'{"prompt": "x", "prompt": ""}', 400),
    (b'{"prompt": "x", "structured_outputs": {"two\\nlines\\u2028": 1}}', 400),
    (b'{"prompt": "' + b"x" * (70 << 10) + b'"}', 413),
]


@pytest.mark.parametrize(("body", "status"), RAW)
def test_raw_bodies(http: httpx.Client, body: bytes, status: int) -> None:
    check_error(http.post(COMPLETIONS, content=body), status, None, is_param_checked=False)


def test_a_body_without_length_is_cut_off_while_it_is_read(http: httpx.Client) -> None:
    num_sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal num_sent
        yield b'{"prompt": "'
        for _ in range(1000):
            num_sent += 1
            yield b"x" * 65536

    try:
        answer = http.post(COMPLETIONS, content=endless())
    except httpx.TransportError:
        pass  # the server hung up while we were sending
    else:
        check_error(answer, 413, None)
    assert num_sent < 1000


def test_paths_and_methods(http: httpx.Client) -> None:
    check_error(http.get("/nowhere"), 404, None)
    check_error(http.post("/v1/models", json={}), 405, None)
    check_error(http.get(COMPLETIONS), 405, None)


def test_a_request_left_half_sent_disturbs_nobody(server: RunningServer, http: httpx.Client) -> None:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert http.post(COMPLETIONS, json={**P, "max_tokens": 2}).status_code == 200
    assert http.get("/health").status_code == 200


def test_the_server_went_on(http: httpx.Client, server: RunningServer) -> None:
    assert http.post(COMPLETIONS, json={**P, "max_tokens": 2}).status_code == 200
    assert server.metric("engine_failed_steps_total") == 0
    assert "Traceback" not in server.log()


def check_error(answer: httpx.Response, status: int, param: str | None, *, is_param_checked: bool = True) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = json.loads(answer.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"].splitlines()) == 1 and "Traceback" not in error["message"]
    assert error["type"] == "invalid_request_error"
    if is_param_checked:
        assert error["param"] == param
