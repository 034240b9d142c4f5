"""The streaming client and the load it makes: counts, times, failures, connections."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from ropeway.bench.client import Client, ClientError, Endpoint, StreamReader
from ropeway.bench.load import LoadOptions, Run, run_load
from ropeway.bench.server_counters import ServerCounters, counters_problem, parse_server_counters, read_server_counters
from ropeway.bench.workload import BenchRequest
from ropeway.errors import ConfigError
from support.fake_openai_server import FakeOpenAIServer

REQUESTS = [BenchRequest((5, 6, 7), 4), BenchRequest("two words", 1), BenchRequest((9,), 7)]


def load(server: FakeOpenAIServer, requests: Sequence[BenchRequest] = REQUESTS, **kwargs: Any) -> Run:
    timeout_s = kwargs.pop("timeout_s", 20.0)
    options = kwargs.pop("options", LoadOptions(model="m"))
    pace = kwargs or {"concurrency": 2}

    async def main() -> Run:
        client = Client(Endpoint.parse(server.url), api_key="secret", timeout_s=timeout_s)
        try:
            return await run_load(client, requests, options, **pace)
        finally:
            await client.close()

    with server.running():
        return asyncio.run(main())


def errors_of(run: Run) -> list[str | None]:
    return [record.error for record in run.records]


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 16])
@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
def test_counts_do_not_depend_on_chunks_or_packets(tokens_per_chunk: int, piece_bytes: int) -> None:
    run = load(FakeOpenAIServer(tokens_per_chunk=tokens_per_chunk, piece_bytes=piece_bytes))
    assert errors_of(run) == [None] * 3
    assert sorted(record.num_output_tokens for record in run.records) == [1, 4, 7]
    assert sum(record.num_prompt_tokens for record in run.records) == 6
    chunks = sorted(len(record.chunk_times_s) for record in run.records)
    assert chunks == ([1, 4, 7] if tokens_per_chunk == 1 else [1, 2, 3])
    for record in run.records:
        assert record.start_s < record.chunk_times_s[0] <= record.chunk_times_s[-1] <= record.end_s
        assert (record.tpot_s is None) == (record.num_output_tokens == 1)


def test_what_is_sent() -> None:
    server = FakeOpenAIServer()
    load(server, options=LoadOptions(model="m", extra_body={"cache_prompt": False}), concurrency=1)
    assert server.bodies[0] == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "cache_prompt": False,
    }
    assert server.bodies[1]["prompt"] == "two words"
    assert "Authorization: Bearer secret\r\n" in server.request_heads[-1]
    assert server.num_connections == 1, "a closed loop of one keeps one connection"


def test_ignore_eos_is_not_sent_when_the_end_token_is_respected() -> None:
    server = FakeOpenAIServer(usage_offset=-1)
    run = load(server, REQUESTS[:1], options=LoadOptions(model="m", ignore_eos=False))
    assert "ignore_eos" not in server.bodies[0]
    assert errors_of(run) == [None], "an answer may then be shorter"
    assert "too many output tokens" in str(
        errors_of(load(FakeOpenAIServer(usage_offset=1), options=LoadOptions(model="m", ignore_eos=False)))[0]
    )


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (FakeOpenAIServer(usage_offset=-1), "asked for 7, got 6"),
        (FakeOpenAIServer(has_done=False), "without a finish reason"),
        (FakeOpenAIServer(refusal=(400, {"error": {"message": "too long: 9 > 4"}})), "HTTP 400: too long: 9 > 4"),
        (FakeOpenAIServer(refusal=(503, {"detail": "busy"})), "HTTP 503"),
        (FakeOpenAIServer(error_event={"message": "engine died"}), "engine died"),
        (FakeOpenAIServer(cut_after_bytes=120), "connection was lost"),
    ],
)
def test_failures_are_counted_with_their_reason(server: FakeOpenAIServer, message: str) -> None:
    run = load(server, REQUESTS[2:])
    assert message in str(errors_of(run)[0])
    assert run.duration_s > 0


def test_a_wrong_prompt_count_is_a_failure() -> None:
    server = FakeOpenAIServer()
    original = server._events
    server._events = lambda body: [  # type: ignore[method-assign]
        event.replace('"prompt_tokens": 3', '"prompt_tokens": 4') for event in original(body)
    ]
    assert "sent 3, counted 4" in str(errors_of(load(server, REQUESTS[:1]))[0])


def test_a_timeout_fails_the_request_and_the_run_goes_on() -> None:
    run = load(FakeOpenAIServer(delay_s=5.0), REQUESTS[:2], timeout_s=0.05)
    assert errors_of(run) == ["no whole answer within 0.05 s"] * 2


def test_a_server_that_closes_after_each_answer_without_saying_so() -> None:
    server = FakeOpenAIServer(closes_after_answer=True)
    run = load(server, REQUESTS * 4, concurrency=1)
    assert errors_of(run) == [None] * 12
    assert len(server.bodies) == 12, "a request is sent again only if it was never read"


def test_nobody_listens() -> None:
    async def main() -> None:
        await Client(Endpoint("127.0.0.1", 9, "", False)).get("/v1/models")

    with pytest.raises(ClientError, match="cannot connect to 127.0.0.1:9"):
        asyncio.run(main())


def test_what_answers_is_not_http() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        async with server:
            await Client(Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "", False)).get("/x")

    with pytest.raises(ClientError, match="not HTTP"):
        asyncio.run(main())


def test_closed_loop_keeps_its_concurrency() -> None:
    server = FakeOpenAIServer(delay_s=0.02)
    load(server, [BenchRequest((1,), 1)] * 12, concurrency=4)
    assert server.max_running == 4


def test_open_loop_counts_from_the_due_time_and_never_waits_for_answers() -> None:
    server = FakeOpenAIServer(delay_s=0.05)
    start_s = time.perf_counter()
    run = load(server, [BenchRequest((1,), 1)] * 5, arrivals_s=[0.0, 0.0, 0.0, 0.01, 0.01])
    assert server.max_running == 5
    starts = [record.start_s for record in run.records]
    assert starts[0] >= start_s
    assert starts[0] == starts[2]
    assert starts[3] - starts[0] == pytest.approx(0.01)
    assert all(record.ttft_s >= 0.05 for record in run.records)


def test_server_counters_are_read_around_the_run() -> None:
    assert load(FakeOpenAIServer()).server_counters == ServerCounters(3, 30)
    assert load(FakeOpenAIServer(metrics_status=404)).server_counters is None


def test_the_admin_key_goes_to_metrics_only() -> None:
    with FakeOpenAIServer().running() as server:

        async def main() -> None:
            for admin_key in ("boss", None):
                client = Client(Endpoint.parse(server.url), api_key="mine", admin_api_key=admin_key)
                assert await counters_problem(client) is None
                await client.get("/v1/models")
                await client.close()

        asyncio.run(main())
    sent = [re.search("Bearer (.*)\r", head)[1] for head in server.request_heads]  # type: ignore[index]
    assert sent == ["boss", "mine", "mine", "mine"]


@pytest.mark.parametrize(("status", "is_told"), [(401, True), (403, True), (404, False)])
def test_a_refusal_of_metrics_names_the_flag(status: int, is_told: bool) -> None:
    with FakeOpenAIServer(metrics_status=status).running() as server:

        async def main() -> str | None:
            client = Client(Endpoint.parse(server.url))
            assert await read_server_counters(client) is None
            problem = await counters_problem(client)
            await client.close()
            return problem

        problem = asyncio.run(main())
    assert (problem is not None and "--admin-api-key" in problem) == is_told


def test_counters_of_other_servers() -> None:
    text = 'vllm:num_preemptions_total{engine="0"} 2.0\nvllm:num_preemptions_total{engine="1"} 3\nx_num_preemptions 9\n'
    assert parse_server_counters(text) == ServerCounters(5, None)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://127.0.0.1:8000", Endpoint("127.0.0.1", 8000, "", False)),
        ("http://127.0.0.1:8000/v1/", Endpoint("127.0.0.1", 8000, "", False)),
        ("localhost:81", Endpoint("localhost", 81, "", False)),
        ("https://api.example.org/llm/v1", Endpoint("api.example.org", 443, "/llm", True)),
    ],
)
def test_endpoints(url: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(url) == endpoint


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:99999"])
def test_bad_endpoints(url: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint.parse(url)


def test_the_reader_takes_the_time_of_arrival() -> None:
    arrivals_s = iter((1.0, 2.0, 3.0, 4.0))
    reader = StreamReader(clock=lambda: next(arrivals_s))

    def event(text: str) -> bytes:
        return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": None}]}).encode() + b"\n\n"

    for data in (event("a") + event("b")[:9], event("b")[9:], event(""), b": ping\n\n"):
        reader.feed(data)
    assert reader.chunk_times_s == [1.0, 2.0], "a chunk without text shows nothing"
    assert reader.end_s == 3.0
    with pytest.raises(ClientError, match="not JSON"):
        StreamReader().feed(b"data: {nope\n\n")
