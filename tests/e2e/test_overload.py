"""A full queue and a request out of time, over HTTP: a status of their own, streamed or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.running_server import RunningServer, wait_until

FLAGS = ("--num-kv-blocks", "64", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
LONG = {"prompt": "go on", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny_model_path: Path) -> Iterator[RunningServer]:
    with RunningServer(tiny_model_path, *FLAGS, "--backend", "reference") as running:
        yield running


def post(url: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={**LONG, **fields}, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_with_retry_after_and_opens_again(server: RunningServer, stream: bool) -> None:
    body = {**LONG, "n": 32, "stream": True}  # one place: half a minute of work, and nobody waits for its end
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body) as first, httpx.stream("POST", url, json=body) as second:
        assert first.status_code == second.status_code == 200
        refused = post(server.url, stream=stream)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert "max_num_queued_reqs is 1" in refused.json()["error"]["message"]
    wait_until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0)
    assert post(server.url, stream=stream, max_tokens=1).status_code == 200


def test_out_of_time_is_504_or_the_last_event_of_a_stream(server: RunningServer) -> None:
    whole = post(server.url, timeout=0.05)
    assert whole.status_code == 504 and whole.json()["error"]["code"] == "timeout"
    assert '"code":"timeout"' in post(server.url, timeout=0.05, stream=True).text
    for bad in ({"timeout": 0}, {"queue_timeout": -1}):
        answer = post(server.url, **bad)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in bad
    wait_until(lambda: server.metric("num_requests_running") == 0)
