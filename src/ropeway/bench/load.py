"""Sends a workload to a server, in a closed loop or at given arrival times, and records what came back.

Knows how to pace and to check answers; knows nothing of statistics or of where the requests came from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ropeway.bench.client import Client, ClientError, StreamReader
from ropeway.bench.server_counters import ServerCounters, read_server_counters
from ropeway.bench.workload import BenchRequest


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One answered or failed request. Times are seconds on one clock; `chunk_times_s`: arrivals of chunks with text."""

    start_s: float
    end_s: float
    chunk_times_s: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token: from the send (or the due arrival time) to the first text shown."""
        return (self.chunk_times_s[0] if self.chunk_times_s else self.end_s) - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, the request's mean; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: from the send (or the due arrival time) to the end of the last chunk."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests are asked for: sampling is greedy, and with `ignore_eos` every answer must be of full length."""

    model: str
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run: `client_cpu_s` is the processor time this process spent meanwhile."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    client_cpu_s: float
    server_counters: ServerCounters | None


def encode_requests(client: Client, requests: Sequence[BenchRequest], options: LoadOptions) -> list[bytes]:
    """The HTTP bytes of every request, made before the clock runs."""
    return [client.encode("POST", "/v1/completions", orjson.dumps(_body(request, options))) for request in requests]


def _body(request: BenchRequest, options: LoadOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    return body | options.extra_body


async def run_load(
    client: Client,
    requests: Sequence[BenchRequest],
    options: LoadOptions,
    *,
    arrivals_s: Sequence[float] | None = None,
    concurrency: int | None = None,
    on_finish: Callable[[RequestRecord], None] = lambda record: None,
) -> Run:
    """Runs `requests`: at `arrivals_s` after the start, or else as a closed loop that keeps `concurrency` in flight.

    A due request is never delayed by slow answers: in the open form latencies count from the due time.
    """
    assert (arrivals_s is None) != (concurrency is None), "either arrival times or a concurrency"
    encoded = encode_requests(client, requests, options)
    before = await read_server_counters(client)
    cpu_before_s = time.process_time()
    start_s = time.perf_counter()

    async def send(index: int, due_s: float | None) -> RequestRecord:
        record = await _send(client, requests[index], encoded[index], due_s, options.ignore_eos)
        on_finish(record)
        return record

    if concurrency is not None:
        records = await _closed_loop(send, len(requests), concurrency)
    else:
        assert arrivals_s is not None
        records = await _open_loop(send, [start_s + arrival for arrival in arrivals_s])
    duration_s = time.perf_counter() - start_s
    cpu_s = time.process_time() - cpu_before_s
    after = await read_server_counters(client)
    counters = after.since(before) if before is not None and after is not None else None
    return Run(tuple(records), duration_s, cpu_s, counters)


_Send = Callable[[int, float | None], Coroutine[Any, Any, RequestRecord]]


async def _closed_loop(send: _Send, count: int, concurrency: int) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    indices = iter(range(count))

    async def worker() -> None:
        for index in indices:
            records.append(await send(index, None))

    async with asyncio.TaskGroup() as workers:
        for _ in range(min(concurrency, count)):
            workers.create_task(worker())
    return records


async def _open_loop(send: _Send, due_times_s: Sequence[float]) -> list[RequestRecord]:
    tasks: list[asyncio.Task[RequestRecord]] = []
    async with asyncio.TaskGroup() as group:
        for index, due_s in enumerate(due_times_s):
            await asyncio.sleep(due_s - time.perf_counter())
            tasks.append(group.create_task(send(index, due_s)))
    return [task.result() for task in tasks]


async def _send(
    client: Client, request: BenchRequest, encoded: bytes, due_s: float | None, is_full_length_due: bool
) -> RequestRecord:
    reader = StreamReader()
    start_s = time.perf_counter() if due_s is None else due_s
    error: str | None = None
    try:
        await client.stream(encoded, reader)
        error = _answer_error(request, reader, is_full_length_due)
    except ClientError as failure:
        error = str(failure)
    return RequestRecord(
        start_s=start_s,
        end_s=time.perf_counter() if reader.end_s is None else reader.end_s,
        chunk_times_s=tuple(reader.chunk_times_s),
        num_prompt_tokens=reader.num_prompt_tokens or 0,
        num_output_tokens=reader.num_output_tokens or 0,
        error=error,
    )


def _answer_error(request: BenchRequest, reader: StreamReader, is_full_length_due: bool) -> str | None:
    """What is wrong with a whole answer, or None: its end, its usage, and both token counts are checked."""
    if reader.finish_reason is None or not reader.is_done:
        return "the stream ended without a finish reason and [DONE]"
    if reader.num_output_tokens is None or reader.num_prompt_tokens is None:
        return "the stream states no usage, so its tokens cannot be counted"
    if is_full_length_due and reader.num_output_tokens != request.max_tokens:
        return f"wrong number of output tokens: asked for {request.max_tokens}, got {reader.num_output_tokens}"
    if reader.num_output_tokens > request.max_tokens:
        return f"too many output tokens: at most {request.max_tokens} asked for, got {reader.num_output_tokens}"
    if not isinstance(request.prompt, str) and reader.num_prompt_tokens != len(request.prompt):
        return f"wrong number of prompt tokens: sent {len(request.prompt)}, counted {reader.num_prompt_tokens}"
    return None
