"""Clients that are many, slow, or stopped: others do not notice, and what is kept for them is bounded."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.e2e.conftest import ENGINE_FLAGS
from tests.support.running_server import RunningServer, wait_until

NUM_STREAMS = 100
LONG = {"prompt": "go on", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 4}
WORDY = {**LONG, "n": 8, "logprobs": 5, "stream": True}  # some 2 MB
BIG = {**SHORT, "prompt": ["go on, " * 10] * 200, "echo": True, "logprobs": 5, "max_tokens": 1}
TIMEOUTS = ("--header-timeout", "3", "--body-timeout", "3", "--write-timeout", "3", "--max-unread-size", "96K")


@pytest.fixture(scope="module")
def server(tiny_model_path: Path) -> Iterator[RunningServer]:
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--backend", "native", *TIMEOUTS) as running:
        yield running


def get(server: RunningServer, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", timeout=60)


def connect(server: RunningServer, window_bytes: int | None = None) -> socket.socket:
    parts = urlsplit(server.url)
    client = socket.socket()
    if window_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
    client.settimeout(30)
    client.connect((parts.hostname, parts.port))
    return client


def post(path: str, fields: dict[str, Any], *headers: str) -> bytes:
    body = json.dumps(fields).encode()
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def read_all(client: socket.socket) -> bytes:
    data = b""
    while received := client.recv(1 << 16):
        data += received
    return data


def is_served(server: RunningServer) -> bool:
    answer = httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=30)
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


def slow_clients(server: RunningServer, phase: str) -> int:
    lines = get(server, "/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if "slow_clients_total" in line and phase in line)


def test_many_streams_complete(server: RunningServer) -> None:
    clients = [connect(server) for _ in range(NUM_STREAMS)]
    for client in clients:
        client.sendall(post("/v1/completions", {**SHORT, "stream": True}, "Connection: close"))
    assert all(read_all(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for client in clients)
    for client in clients:
        client.close()


def test_headers_and_bodies_that_dribble_are_cut_off_and_others_served(server: RunningServer) -> None:
    beginnings = {
        "nothing": b"",
        "a path": b"POST /v1/comple",
        "line ends": b"\r\n",
        "headers": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-a: ",
        "a body": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n",
        "chunks": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        "a body that nobody reads": b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n",
    }
    before = {phase: slow_clients(server, phase) for phase in ("headers", "body")}
    clients = {name: connect(server) for name in beginnings}
    answers = dict.fromkeys(beginnings, b"")

    def dribble(name: str) -> None:
        client, drop = clients[name], {"line ends": b"\r\n", "chunks": b"1\r\nx\r\n"}.get(name, b"x")
        client.sendall(beginnings[name])
        while name != "nothing":
            time.sleep(0.2)
            try:
                client.sendall(drop)
            except OSError:
                return

    threads = [threading.Thread(target=dribble, args=(name,)) for name in beginnings]
    for thread in threads:
        thread.start()
    assert is_served(server)
    for name, client in clients.items():
        with client, contextlib.suppress(ConnectionResetError):  # where it still sent
            while received := client.recv(1 << 16):
                answers[name] += received
    for thread in threads:
        thread.join()
    for name in ("nothing", "a path", "line ends", "headers", "a body", "chunks"):
        assert answers[name].startswith(b"HTTP/1.1 408 "), (name, answers[name])
        assert b'"code":"request_timeout"' in answers[name], name
    assert answers["a body that nobody reads"].startswith(b"HTTP/1.1 404 ")
    assert slow_clients(server, "headers") - before["headers"] == 4
    assert slow_clients(server, "body") - before["body"] == 3


def test_headers_without_end_are_refused(server: RunningServer) -> None:
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with pytest.raises(OSError):
            for number in range(100_000):
                client.sendall(b"x-%d: %s\r\n" % (number, b"y" * 1000))
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nx-a: " + b"y" * (80 << 10))
        assert read_all(client).startswith(b"HTTP/1.1 431 ")
    assert is_served(server)


def test_a_reader_that_stops_is_cut_off_and_told_why(server: RunningServer) -> None:
    before = slow_clients(server, "answer")
    with connect(server, window_bytes=2048) as slow:
        slow.sendall(post("/v1/completions", WORDY, "x-request-id: stopped"))
        assert is_served(server)
        wait_until(lambda: get(server, "/v1/requests/stopped").json()["state"] == "aborted", 60)
        assert "unread" in get(server, "/v1/requests/stopped").json()["error"]
        wait_until(lambda: slow_clients(server, "answer") == before + 1, 60)
        wait_until(lambda: server.metric("num_requests_running") == 0, 60)
        assert server.metric("kv_cache_usage_perc") == 0
    assert "stopped" in server.log() and "has not read its answer for 3 s" in server.log()


def test_who_reads_on_after_too_much_was_left_unread_gets_an_error(tiny_model_path: Path) -> None:
    flags = ("--backend", "native", "--max-unread-size", "96K")
    with (
        RunningServer(tiny_model_path, *ENGINE_FLAGS, *flags) as server,
        connect(server, window_bytes=2048) as slow,
    ):
        slow.sendall(post("/v1/completions", WORDY, "x-request-id: late"))
        wait_until(lambda: get(server, "/v1/requests/late").json().get("state") == "aborted", 60)
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = read_all(slow)
    assert b'"code":"request_timeout"' in data and b"[DONE]" not in data
    assert data.endswith(b'{"status":"ok"}')  # the connection is as good as before


def test_an_unread_whole_answer_does_not_keep_its_connection(server: RunningServer) -> None:
    before = slow_clients(server, "answer")
    with connect(server, window_bytes=2048) as slow:
        slow.sendall(post("/v1/completions", BIG, "Connection: close"))
        wait_until(lambda: slow_clients(server, "answer") == before + 1, 60)
    wait_until(lambda: server.metric("connections") == 1)


def test_who_reads_slowly_but_steadily_gets_the_whole_answer(server: RunningServer) -> None:
    before = slow_clients(server, "answer")
    data, began_s = bytearray(), time.monotonic()
    with connect(server, window_bytes=2048) as slow:
        slow.sendall(post("/v1/completions", BIG, "Connection: close"))
        while received := slow.recv(1 << 16):
            data += received
            time.sleep(0.004)
    assert len(json.loads(data.partition(b"\r\n\r\n")[2])["choices"]) == 200
    assert time.monotonic() - began_s > 4, "it took no longer than one may go without reading"
    assert slow_clients(server, "answer") == before


def test_connections_beyond_the_most_are_refused(tiny_model_path: Path) -> None:
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--max-connections", "3") as server:
        clients = [connect(server) for _ in range(3)]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        with connect(server) as refused:
            answer = read_all(refused)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer and b'"overloaded"' in answer
        clients.pop().close()
        wait_until(lambda: get(server, "/health").status_code == 200)
        assert server.metric("connections_refused_total") >= 1
        for client in clients:
            client.close()
