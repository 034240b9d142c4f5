"""Starting, draining, stopping, keys, and readers that do not read: servers of their own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import OpenAI
from tests.e2e.conftest import ENGINE_FLAGS
from tests.support.running_server import RunningServer, wait_until

KEYS = ("--api-key", "s3cret", "--admin-api-key", "b0ss")
SMALL_POOL = ("--num-kv-blocks", "8")
LONG = {"prompt": "go on", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def stream_events(url: str, body: dict[str, Any], started: threading.Event) -> list[dict[str, Any]]:
    events = []
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                started.set()
            elif line == "data: [DONE]":
                events.append({"done": True})
    return events


class Stream(threading.Thread):
    """Reads a stream on a thread of its own; `events` once it has ended."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.started = threading.Event()
        self.events: list[dict[str, Any]] = []
        self._arguments = (url, body)
        self.start()
        assert self.started.wait(30)

    def run(self) -> None:
        self.events = stream_events(*self._arguments, self.started)


def test_sigterm_lets_streams_finish(tiny_model_path: Path) -> None:
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--shutdown-timeout", "60") as server:
        whole = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60).json()["choices"][0]["text"]
        stream = Stream(server.url, LONG)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: not accepts(server.url))
        stream.join(60)
        assert server.wait() == 0
    assert "".join(event["choices"][0]["text"] for event in stream.events[:-1]) == whole
    assert stream.events[-2]["choices"][0]["finish_reason"] == "length" and stream.events[-1] == {"done": True}


def test_sigterm_aborts_what_takes_too_long_and_a_second_ends_at_once(tiny_model_path: Path) -> None:
    endless = {**LONG, "prompt": ["go on"] * 16, "n": 4}
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--shutdown-timeout", "0.1") as server:
        stream = Stream(server.url, endless)
        server.send_signal(signal.SIGINT)
        stream.join(60)
        assert server.wait() == 0
    reasons = [choice["finish_reason"] for event in stream.events[:-1] for choice in event["choices"]]
    assert reasons.count("abort") > 0 and reasons.count(None) < len(reasons)
    assert stream.events[-1] == {"done": True}

    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--shutdown-timeout", "600") as server:
        with httpx.Client(timeout=60) as client:
            request = client.build_request("POST", f"{server.url}/v1/completions", json={**endless, "stream": True})
            answer = client.send(request, stream=True)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: not accepts(server.url))
            start_s = time.monotonic()
            server.send_signal(signal.SIGTERM)
            assert server.wait() == 1
            assert time.monotonic() - start_s < 10
            answer.close()


def accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=1):
            return True
    except OSError:
        return False


def test_api_key_and_slow_reader(tiny_model_path: Path) -> None:
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--backend", "native", *KEYS) as server:
        for authorization in ("Bearer wrong", "Bearer s3cre", "Bearer s3crets", "bearer s3cret", "s3cret", "Bearer"):
            answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": authorization})
            assert answer.status_code == 401, authorization
        assert httpx.get(f"{server.url}/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert httpx.post(f"{server.url}/v1/completions", json=LONG).status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        with OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
        with OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0) as client:
            assert client.models.list().data
        assert "s3cret" not in server.log() and "b0ss" not in server.log()
        check_slow_reader(server, "s3cret")


def check_slow_reader(server: RunningServer, key: str) -> None:
    """A client with the smallest window that does not read: others are served, and it gets its whole answer later."""
    body = json.dumps({**LONG, "max_tokens": 400, "n": 16, "stream": True}).encode()
    parts = urlsplit(server.url)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect((parts.hostname, parts.port))
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "
            + f"{key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_until(lambda: server.metric("generation_tokens_total") > 0)
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={**LONG, "max_tokens": 20},
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )
        assert answer.json()["usage"]["completion_tokens"] == 20
        # The engine finishes the slow reader's answers although nobody reads them.
        wait_until(lambda: server.metric("num_requests_running") == 0, 60)
        data = b""
        while received := slow.recv(1 << 16):
            data += received
    assert data.count(b'"finish_reason":"length"') == 16
    assert b"data: [DONE]" in data


def run_command(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ropeway", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_port_in_use(tiny_model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run_command("serve", str(tiny_model_path), "--port", port)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and port in result.stderr and "--port" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serve", "no-such-model", "--port", "0"], 1, "no-such-model"),
        (["serve", "--max-num-seqs", "0"], 2, "max_num_seqs"),
        (["serve", "--kv-cache-memory", "lots"], 2, "512M"),
        (["serve", "--port", "99999"], 2, "99999"),
        (["serve", "--frobnicate"], 2, "--frobnicate"),
        (["serve", "--enable-prefix-caching", "--batching", "static"], 2, "without a prefix cache"),
        (["serve", "--enable-prefix-caching", "--no-enable-prefix-caching"], 2, "not allowed with"),
        (["serve", "--shutdown-timeout", "nan"], 2, "--shutdown-timeout"),
        (["serve", "--max-body-size", "-1"], 2, "--max-body-size"),
        (["frobnicate"], 2, "frobnicate"),
        ([], 2, "COMMAND"),
        (["models", "path", "nothing"], 2, "nothing"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, message: str) -> None:
    result = run_command(*arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.count("\n") == 1 and message in result.stderr, result.stderr


def test_out_of_memory_at_start(tiny_model_path: Path) -> None:
    result = run_command("serve", str(tiny_model_path), "--port", "0", "--num-kv-blocks", str(10**9))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "are free" in result.stderr


def test_small_pool_warns_and_serves(tiny_model_path: Path) -> None:
    flags = ("--backend", "native", "--admission", "optimistic")
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, *SMALL_POOL, *flags) as server:
        assert "the effective context is 128" in server.log()
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 128
        body = {**LONG, "max_tokens": 120, "n": 3}
        usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
        assert usage["completion_tokens"] == 360
        assert server.metric("num_preemptions_total") > 0 and server.metric("recomputed_tokens_total") > 0


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run_command("serve", "no-such-model", "--port", "0", "--debug").stderr


def test_version_and_help() -> None:
    assert run_command("--version").stdout.startswith("ropeway ")
    assert "serve" in run_command("--help").stdout
    for command in ("serve", "generate", "models", "bench"):
        assert run_command(command, "--help").returncode == 0


def test_sighup_while_the_model_loads_reads_the_keys_again(tiny_model_path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"old-key": {"tenant": "a"}}')

    class HungUp(RunningServer):
        def wait_ready(self) -> None:
            """Sends the signal once the old keys were read, which is before anything slow."""
            wait_until(lambda: handles(self.process.pid, signal.SIGHUP), 60)
            keys.write_text('{"new-key": {"tenant": "a"}}')
            self.send_signal(signal.SIGHUP)
            super().wait_ready()

    with HungUp(tiny_model_path, *ENGINE_FLAGS, "--api-key-file", str(keys)) as server:
        wait_until(lambda: "read 1 API keys" in server.log())
        for key, status in ("old-key", 401), ("new-key", 200):
            answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_shutdown_ends_a_pause(tiny_model_path: Path) -> None:
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--shutdown-timeout", "600") as server:
        stream = Stream(server.url, {**LONG, "max_tokens": 300})
        assert httpx.post(f"{server.url}/pause").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
        stream.join(60)
    assert stream.events[-2]["choices"][0]["finish_reason"] == "length" and stream.events[-1] == {"done": True}


def test_a_chat_template_of_ones_own(tiny_model_path: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if loud %}!{% endif %}"
    conversation: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--chat-template", template) as server:

        def post(path: str, **fields: Any) -> httpx.Response:
            return httpx.post(server.url + path, json={**conversation, **fields}, timeout=60)

        for variables, text in ({}, "hi"), ({"loud": False, "nobody_looks": {}}, "hi"), ({"loud": True}, "hi!"):
            tokens = post("/tokenize", chat_template_kwargs=variables).json()
            plain = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()
            assert tokens["tokens"] == plain["tokens"]
            usage = post("/v1/chat/completions", chat_template_kwargs=variables, max_tokens=1).json()["usage"]
            assert usage["prompt_tokens"] == plain["count"]
        for path in ("/tokenize", "/v1/chat/completions"):
            refused = post(path, chat_template_kwargs={"messages": []})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"
            assert post(path, chat_template="{{ messages }}").status_code == 400

    (tmp_path / "broken.jinja").write_text("{% for %}")
    for name, message in ("none.jinja", "No such file"), ("broken.jinja", "does not compile"):
        wrong = ("--no-batches", "--chat-template", str(tmp_path / name))
        result = run_command("serve", str(tiny_model_path), "--port", "0", *wrong)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1) and message in result.stderr
