"""How many, how much, how slow: a server's bounds, over real sockets on `ropeway serve` with a tiny random model.

streams   1,000 streams open at once, and all complete.
queue     resident memory of a server for each of 10,000 requests that wait, prompts of 100 tokens, a connection each.
slow      time to an answer for somebody, alone and beside clients that dribble headers and bodies without an end or
          have stopped reading long streams; what was kept for these, and that each was given up in its time.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson

from harness.ledger import read_samples, total
from harness.processes import free_port, resident_bytes, running_server
from harness.raw_http import Exchange, fetch, request_bytes
from harness.results import new_document, result_path, save
from support.random_gguf import RandomModel, write_random_gguf

PARTS = ("streams", "queue", "slow")
NUM_CONNECTING = 200  # connections being made at a time: fewer than the listening backlog holds
STREAM_TOKENS = 50
PROMPT = list(range(65, 165))
QUEUE_STEPS = 4
RESIDENT_SLACK_S = 1.0
NUM_PROBES = 200
NUM_STOPPED = 8
STOPPED_TOKENS = 400
TIMEOUT_S = 5.0
START_TIMEOUT_S = 600.0
MAX_UNREAD_BYTES = 256 << 10
SLOW_FLAGS = (
    "--header-timeout", f"{TIMEOUT_S:g}", "--body-timeout", f"{TIMEOUT_S:g}", "--write-timeout", f"{TIMEOUT_S:g}",
    "--max-unread-size", str(MAX_UNREAD_BYTES),
)  # fmt: skip


def raise_file_limit(num_files: int) -> None:
    """Lets this process, and the servers that it starts, open so many files. Raises SystemExit where it may not."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < num_files:
        raise SystemExit(f"{num_files} open files are needed and {hard} allowed; raise the limit with ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def served(directory: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """(port, process id) of a server of the tiny model."""
    model = directory / "tiny.gguf"
    if not model.exists():
        write_random_gguf(model, RandomModel())
    port = free_port()
    command = [sys.executable, "-m", "ropeway", "serve", model, "--port", str(port), "--no-batches", *flags]
    with running_server(command, port, directory / "server.log", START_TIMEOUT_S) as process_id:
        yield port, process_id


def completion(**fields: object) -> bytes:
    asked = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
    return request_bytes("POST", "/v1/completions", asked)


async def opened(stack: AsyncExitStack, port: int, count: int, data: bytes, **options: int) -> list[Exchange]:
    """So many connections that have sent the same; they close with the stack."""
    gate = asyncio.Semaphore(NUM_CONNECTING)

    async def one() -> Exchange:
        async with gate:
            exchange = await stack.enter_async_context(Exchange(port, **options))
            exchange.send(data)
            return exchange

    return await asyncio.gather(*[one() for _ in range(count)])


async def samples_of(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    return read_samples((await fetch(port, request_bytes("GET", "/metrics")))[1].decode())


async def until_metric(port: int, name: str, value: float, timeout_s: float = 120.0) -> None:
    """Waits until a metric is at least `value`. Raises SystemExit where it does not come to it."""
    end_s = time.monotonic() + timeout_s
    while (found := total(await samples_of(port), name)) < value:
        if time.monotonic() > end_s:
            raise SystemExit(f"{name} came to {found:g} in {timeout_s:g} s, and should have come to {value:g}")
        await asyncio.sleep(0.1)


async def measure_streams(port: int, process_id: int, count: int) -> dict[str, Any]:
    """All are begun before any has ended: the engine is paused until every one is there."""
    await fetch(port, request_bytes("POST", "/pause"))
    before, start_s = resident_bytes(process_id), time.monotonic()
    async with AsyncExitStack() as stack:
        streams = await opened(stack, port, count, completion(max_tokens=STREAM_TOKENS, stream=True))
        await until_metric(port, "num_requests_waiting", count)
        opened_s, waiting = time.monotonic() - start_s, resident_bytes(process_id)
        await fetch(port, request_bytes("POST", "/resume"))
        most_open = int(total(await samples_of(port), "connections")) - 1

        async def read(stream: Exchange) -> bytes:
            return await stream.body() if await stream.head() == 200 else b""

        bodies = await asyncio.gather(*[read(stream) for stream in streams])
    complete = sum(body.endswith(b"data: [DONE]\n\n") and body.count(b"data: {") >= 2 for body in bodies)
    return {
        "num_streams": count,
        "num_open_at_once": most_open,
        "num_complete": complete,
        "num_tokens": int(total(await samples_of(port), "generation_tokens_total")),
        "opened_s": opened_s,
        "all_s": time.monotonic() - start_s,
        "resident_bytes_before": before,
        "resident_bytes_open": waiting,
        "resident_bytes_after": resident_bytes(process_id),
    }


async def measure_queue(port: int, process_id: int, count: int, *, is_streamed: bool) -> dict[str, Any]:
    """Requests that wait while the engine is paused; resident memory is read as their number grows."""
    await fetch(port, request_bytes("POST", "/pause"))
    sizes: list[tuple[int, int]] = [(0, resident_bytes(process_id))]
    async with AsyncExitStack() as stack:
        for step in range(1, QUEUE_STEPS + 1):
            num_more = count * step // QUEUE_STEPS - sizes[-1][0]
            await opened(stack, port, num_more, completion(max_tokens=STREAM_TOKENS, stream=is_streamed))
            await until_metric(port, "num_requests_waiting", sizes[-1][0] + num_more, 300)
            await asyncio.sleep(RESIDENT_SLACK_S)
            sizes.append((sizes[-1][0] + num_more, resident_bytes(process_id)))
            print(f"  {sizes[-1][0]} wait: {sizes[-1][1] / 1e6:.1f} MB resident", flush=True)
        start_s = time.monotonic()
        await fetch(port, request_bytes("GET", "/health"))
        health_s = time.monotonic() - start_s
    await fetch(port, request_bytes("POST", "/resume"))
    end_s = time.monotonic() + 120
    while total(await samples_of(port), "num_requests_waiting") and time.monotonic() < end_s:
        await asyncio.sleep(0.1)
    return {
        "num_requests": count,
        "is_streamed": is_streamed,
        "num_prompt_tokens": len(PROMPT),
        "resident_bytes": sizes,
        "bytes_per_request": (sizes[-1][1] - sizes[0][1]) / count,
        "health_ms": 1000 * health_s,
        "num_left_waiting": int(total(await samples_of(port), "num_requests_waiting")),
        "resident_bytes_after_leaving": resident_bytes(process_id),
    }


async def probe(port: int, count: int) -> list[float]:
    """Milliseconds of short answers, one after the other, each on a connection of its own."""
    found = []
    for _ in range(count):
        start_s = time.monotonic()
        status, body = await fetch(port, completion(max_tokens=8))
        found.append(1000 * (time.monotonic() - start_s))
        if status != 200 or orjson.loads(body)["usage"]["completion_tokens"] != 8:
            raise SystemExit(f"a short request was answered {status}: {body[:200]!r}")
    return found


async def dribble(port: int, beginning: bytes, drop: bytes) -> float:
    """Seconds that the server bore with a client that sends so."""
    start_s = time.monotonic()
    async with Exchange(port) as exchange:
        exchange.send(beginning)
        answered = asyncio.create_task(exchange.head())
        while not answered.done():
            exchange.send(drop)
            await asyncio.wait([answered], timeout=0.5)
        if answered.result() != 408:
            raise SystemExit(f"a client that dribbles was answered {answered.result()}, not 408")
    return time.monotonic() - start_s


async def measure_slow(port: int, process_id: int, count: int) -> dict[str, Any]:
    """Short answers alone, then while `count` clients of each kind are slow, in turn; interleaved twice."""
    headers = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    alone, beside = [], []
    borne_s: dict[str, list[float]] = {"headers": [], "body": []}
    await probe(port, NUM_PROBES // 4)  # the first answers of a server warm it up
    kept = 0
    for _ in range(2):
        alone += await probe(port, NUM_PROBES // 2)
        before, slow_before = resident_bytes(process_id), total(await samples_of(port), "slow_clients_total")
        async with AsyncExitStack() as stack:
            stopped = completion(max_tokens=STOPPED_TOKENS, n=8, logprobs=5, stream=True)
            await opened(stack, port, NUM_STOPPED, stopped, window_bytes=2048)
            dribbling = {
                "headers": [asyncio.create_task(dribble(port, headers, b"x-a: b\r\n")) for _ in range(count)],
                "body": [
                    asyncio.create_task(dribble(port, headers + b"Content-Length: 100000\r\n\r\n", b"x"))
                    for _ in range(count)
                ],
            }
            end_s = time.monotonic() + 60  # what they asked for is aborted within that
            while total(await samples_of(port), "num_requests_running") and time.monotonic() < end_s:
                await asyncio.sleep(0.1)
            beside += await probe(port, NUM_PROBES // 2)
            kept = max(kept, resident_bytes(process_id) - before)
            await until_metric(port, "slow_clients_total", slow_before + 2 * count + NUM_STOPPED)
            for phase, tasks in dribbling.items():
                borne_s[phase] += await asyncio.gather(*tasks)
    samples = await samples_of(port)
    slow = {labels["phase"]: int(value) for labels, value in samples["slow_clients_total"]}
    return {
        "num_dribbling_each": count,
        "num_stopped": NUM_STOPPED,
        "alone_ms": summary(alone),
        "beside_ms": summary(beside),
        "borne_s": {phase: summary(values) for phase, values in borne_s.items()},
        "slow_clients": slow,
        "most_resident_bytes_for_them": kept,
        "kv_cache_usage": total(samples, "kv_cache_usage_perc"),
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))], "most": ordered[-1]}


async def perform(part: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    many = ("--max-num-seqs", "128", "--max-num-batched-tokens", "2048", "--num-kv-blocks", "8192")
    if part == "streams":
        with served(directory, *many) as (port, process_id):
            return await measure_streams(port, process_id, args.num_streams)
    if part == "queue":
        found: dict[str, Any] = {}
        for is_streamed in (True, False):
            with served(directory, "--max-num-seqs", "16") as (port, process_id):
                result = await measure_queue(port, process_id, args.num_queued, is_streamed=is_streamed)
            found["streamed" if is_streamed else "whole"] = result
        return found
    with served(directory, *many, *SLOW_FLAGS) as (port, process_id):
        return await measure_slow(port, process_id, args.num_slow)


def faults_of(part: str, result: dict[str, Any]) -> list[str]:
    """What a result must hold and does not."""
    if part == "streams":
        wanted = {"num_open_at_once": result["num_streams"], "num_complete": result["num_streams"]}
        wanted["num_tokens"] = result["num_streams"] * STREAM_TOKENS
        found = {name: result[name] for name in wanted}
    elif part == "queue":
        found = {f"{name} left waiting": kind["num_left_waiting"] for name, kind in result.items()}
        wanted = dict.fromkeys(found, 0)
    else:
        count = result["num_dribbling_each"]
        wanted = {"headers": 2 * count, "body": 2 * count, "answer": 2 * result["num_stopped"], "KV blocks held": 0}
        found = result["slow_clients"] | {"KV blocks held": result["kv_cache_usage"]}
    return [f"{name} is {found[name]}, and should be {wanted[name]}" for name in wanted if found[name] != wanted[name]]


def shown(part: str, result: dict[str, Any]) -> str:
    """The figures of a part, in a line or two."""
    if part == "streams":
        each = (result["resident_bytes_open"] - result["resident_bytes_before"]) / result["num_streams"]
        return (
            f"{result['num_complete']} of {result['num_streams']} streams complete, {result['num_open_at_once']} open "
            f"at once, {result['all_s']:.1f} s; {each / 1000:.1f} kB each while open"
        )
    if part == "queue":
        return "; ".join(
            f"{kind['num_requests']} {name} requests wait at {kind['bytes_per_request'] / 1000:.1f} kB each"
            for name, kind in result.items()
        )
    alone, beside = result["alone_ms"], result["beside_ms"]
    return (
        f"a short answer takes {alone['p50']:.1f} ms alone (p99 {alone['p99']:.1f}), {beside['p50']:.1f} ms "
        f"(p99 {beside['p99']:.1f}) beside {2 * result['num_dribbling_each']} that dribble and {result['num_stopped']} "
        f"that have stopped reading, kept in {result['most_resident_bytes_for_them'] / 1e6:.1f} MB; given up after at "
        f"most {max(borne['most'] for borne in result['borne_s'].values()):.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--num-streams", type=int, default=1000)
    parser.add_argument("--num-queued", type=int, default=10_000)
    parser.add_argument("--num-slow", type=int, default=100, help="clients that dribble, of each kind")
    args = parser.parse_args()
    raise_file_limit(max(args.num_streams, args.num_queued) + 200)
    options = {"num_streams": args.num_streams, "num_queued": args.num_queued, "num_slow": args.num_slow}
    document = new_document("bounds", options | {"parts": args.parts})
    path, wrong = result_path(document), []
    with tempfile.TemporaryDirectory() as name:
        for part in args.parts:
            result = document[part] = asyncio.run(perform(part, Path(name), args))
            faults = faults_of(part, result)
            print(f"{part}: {shown(part, result)}", *faults, sep="\n  ", flush=True)
            wrong += faults
            save(path, document | {"wrong": wrong})
    print(path)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
