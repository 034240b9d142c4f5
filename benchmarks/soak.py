"""A server under chaos: random load, clients that leave, stop, dribble or err, pauses, key reloads, a full queue.

A tiny random model is served by `ropeway serve` as a process of its own, with keys of three tenants. When the time is
over and everything has come to rest: every KV block is free, only the connection that asks is open, resident memory is
what it was after the warm-up, and the metrics say of every request, once and by class, what this client counted.

The warm-up fills what the server keeps for a while (ended requests, responses), since that is bounded by number and
would look like a leak until it is full; then chaos replaces all of it by its own. Meanwhile CPython's free lists fill:
it keeps up to 2,000 tuples of each length below 20, 5 MB in all, until a full garbage collection. After some 9,700
sequences of a run those were 34,000 blocks, and not one object was in an unreachable circle. Memory is compared after:
the median of the last quarter with that of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.chaos import ADMIN_KEY, MAX_BODY_BYTES, Ask, Chaos, Keys
from harness.ledger import read_samples, total
from harness.processes import free_port, resident_bytes, resident_parts, running_server
from harness.results import ROOT, new_document, result_path, save
from support.random_gguf import RandomModel, write_random_gguf

NUM_CLIENTS = 24
MAX_MEMORY_GROWTH = 0.02
SAMPLE_S = 5.0
START_TIMEOUT_S = 600.0
REPORT_S = 30.0
OPERATE_S = 8.0  # between an operator's actions
QUIET_TIMEOUT_S = 120.0
BURST = 96
WARM_UP_REQUESTS = 4200  # as many as the server remembers
WARM_UP_RESPONSES = 1050
WARM_UP_SEQUENCES = 10000  # of the chaos: 7,000 answers, of which one in six is a response that is stored
FLAGS = (
    "--max-num-seqs", "16", "--num-kv-blocks", "256", "--max-num-queued-reqs", "48", "--max-num-batched-tokens", "256",
    "--header-timeout", "3", "--body-timeout", "3", "--write-timeout", "4", "--max-unread-size", "128K",
    "--max-body-size", str(MAX_BODY_BYTES), "--admin-api-key", ADMIN_KEY, "--served-model-name", "tiny", "--no-batches",
)  # fmt: skip


class Soak:
    """One run against the server with this process id."""

    def __init__(self, chaos: Chaos, keys: Keys, process_id: int, rng: random.Random) -> None:
        self._chaos = chaos
        self._keys = keys
        self._process_id = process_id
        self._rng = rng
        self.memory: list[tuple[float, int]] = []  # seconds since the start, resident bytes

    async def warm_up(self, num_requests: int, num_responses: int) -> None:
        """Fills what is kept of ended requests and responses."""
        asks = [Ask("/v1/completions", {"prompt": "a", "max_tokens": 1}, False)] * num_requests
        asks += [
            Ask("/v1/responses", {"input": self._chaos.asks.text(), "max_output_tokens": 32}, False)
            for _ in range(num_responses)
        ]

        async def client() -> None:
            while asks:
                await self._chaos.ask(asks.pop())

        await asyncio.gather(*[client() for _ in range(NUM_CLIENTS)])

    async def run(self, duration_s: float, num_sequences: int = 0) -> None:
        """The chaos, for so long, and until so many sequences more have ended."""
        loop = asyncio.get_running_loop()
        start_s, ended = loop.time(), self._chaos.ledger.ended
        end_s, num_at_end = start_s + duration_s, sum(ended.values()) + num_sequences
        self.memory = []

        def is_over() -> bool:
            return loop.time() >= end_s and sum(ended.values()) >= num_at_end

        async def client() -> None:
            while not is_over():
                await self._chaos.act()

        async def watch() -> None:
            next_report_s = start_s
            while True:
                now_s = loop.time()
                self.memory.append((now_s - start_s, resident_bytes(self._process_id)))
                if now_s >= next_report_s:
                    next_report_s = now_s + REPORT_S
                    ledger = self._chaos.ledger
                    print(
                        f"{now_s - start_s:5.0f} s of {duration_s:g}: {ledger.num_requests} requests, "
                        f"{sum(ledger.ended.values())} sequences ended, {ledger.num_refused} refused, "
                        f"{self.memory[-1][1] / 1e6:.1f} MB resident, {len(ledger.faults)} faults",
                        flush=True,
                    )
                await asyncio.sleep(SAMPLE_S)

        watching = asyncio.create_task(watch())
        await asyncio.gather(self._operate(is_over), *[client() for _ in range(NUM_CLIENTS)])
        watching.cancel()

    async def _operate(self, is_over: Callable[[], bool]) -> None:
        actions = (self._reload_keys, self._reload_nonsense, self._pause, self._burst)
        number = 0
        while not is_over():
            await asyncio.sleep(OPERATE_S * self._rng.random())
            await actions[number % len(actions)]()
            number += 1

    async def _reload_keys(self) -> None:
        self._keys.rewrite()
        self._signal()

    async def _reload_nonsense(self) -> None:
        self._keys.spoil()
        self._signal()
        await asyncio.sleep(0.5)
        await self._reload_keys()

    def _signal(self) -> None:
        os.kill(self._process_id, signal.SIGHUP)

    async def _pause(self) -> None:
        await self._chaos.pause(self._rng.choice((0.1, 0.5, 1.0)))

    async def _burst(self) -> None:
        await self._chaos.burst(BURST)

    async def rest(self) -> tuple[str, list[str]]:
        """Waits until nothing is under way; the metrics then, and what is wrong with them."""
        end_s = time.monotonic() + QUIET_TIMEOUT_S
        while True:
            text = await self._chaos.metrics()
            # The request for these metrics is counted by the next ones.
            self._chaos.ledger.seen["GET", "/metrics", 200] -= 1
            wrong = [f"{name} is {value:g}" for name, value in state_of(text).items() if value] + (
                self._chaos.ledger.differences(text)
            )
            self._chaos.ledger.seen["GET", "/metrics", 200] += 1
            if not wrong or time.monotonic() > end_s:
                return text, wrong
            await asyncio.sleep(1)


def state_of(text: str) -> dict[str, float]:
    """What must be 0 at rest."""
    samples = read_samples(text)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_failed_steps_total")
    return {name: total(samples, name) for name in names} | {"other connections": total(samples, "connections") - 1}


def growth(memory: list[tuple[float, int]]) -> dict[str, float]:
    """Medians of the first and the last quarter, and by how much the last is more."""
    values = [num_bytes for _, num_bytes in memory]
    quarter = max(1, len(values) // 4)
    first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    return {"first_quarter": first, "last_quarter": last, "growth": last / first - 1, "most": max(values)}


async def perform(document: dict[str, Any], process_id: int, port: int, keys: Keys) -> list[str]:
    """Warm-up, chaos, rest; fills the document, and returns what is wrong."""
    options = document["options"]
    rng = random.Random(options["seed"])
    chaos = Chaos(port, keys, rng)
    soak = Soak(chaos, keys, process_id, rng)
    chaos.ledger.begin(await chaos.metrics())
    start_s = time.monotonic()
    await soak.warm_up(options["warm_up_requests"], options["warm_up_responses"])
    document["warm_up_s"] = time.monotonic() - start_s
    print(f"warmed up in {document['warm_up_s']:.0f} s, {resident_bytes(process_id) / 1e6:.1f} MB resident", flush=True)
    await soak.run(0, options["warm_up_sequences"])
    print("everything that is kept is the chaos's own", flush=True)
    parts = [resident_parts(process_id)]
    await soak.run(options["duration_s"])
    parts.append(resident_parts(process_id))
    text, wrong = await soak.rest()
    document["memory"] = growth(soak.memory) | {"at_rest": resident_bytes(process_id)}
    document["memory_parts"] = parts  # before and after what is compared: where a growth is
    document["memory_samples"] = soak.memory
    document["client"] = chaos.ledger.table()
    samples = read_samples(text)
    document["server"] = {
        name: total(samples, name)
        for name in ("http_requests_total", "request_success_total", "requests_refused_total", "slow_clients_total",
                     "engine_steps_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
                     "request_timeouts_total", "connections_refused_total")
    } | state_of(text)  # fmt: skip
    if options["checks_memory"] and abs(document["memory"]["growth"]) > MAX_MEMORY_GROWTH:
        wrong.append(f"resident memory changed by {document['memory']['growth']:+.1%} after the warm-up")
    return wrong


def run(document: dict[str, Any], directory: Path, flags: tuple[str, ...] = ()) -> list[str]:
    """Serves, soaks, and returns what is wrong."""
    model = write_random_gguf(directory / "tiny.gguf", RandomModel())
    keys = Keys(directory / "keys.json")
    port, log_path = free_port(), directory / "server.log"
    command = [sys.executable, "-m", "ropeway", "serve", model, "--port", str(port), *FLAGS, *flags]
    command += ["--api-key-file", directory / "keys.json"]
    with running_server(command, port, log_path, START_TIMEOUT_S) as process_id:
        wrong = asyncio.run(perform(document, process_id, port, keys))
    log = log_path.read_text()
    wrong += [
        line for line in log.splitlines() if "Traceback" in line or " ERROR " in line and "API keys stay" not in line
    ]
    document["wrong"] = wrong
    return wrong


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "seed": args.seed,
        "duration_s": args.duration,
        "warm_up_requests": WARM_UP_REQUESTS,
        "warm_up_responses": WARM_UP_RESPONSES,
        "warm_up_sequences": WARM_UP_SEQUENCES,
        "num_clients": NUM_CLIENTS,
        "flags": FLAGS,
        "checks_memory": True,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=720.0, metavar="SECONDS", help="of the chaos; default: 720")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    document = new_document("soak", options_of(args))
    with tempfile.TemporaryDirectory(dir=ROOT / "build" if (ROOT / "build").exists() else None) as name:
        wrong = run(document, Path(name))
    path = result_path(document)
    save(path, document)
    memory, client = document["memory"], document["client"]
    print(
        f"{client['num_requests']} requests, {sum(client['sequences_ended'].values())} sequences; "
        f"resident {memory['first_quarter'] / 1e6:.1f} MB, later {memory['last_quarter'] / 1e6:.1f} MB "
        f"({memory['growth']:+.2%}); {len(wrong)} things are wrong"
    )
    for line in wrong[:50]:
        print(f"  {line}")
    print(path)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
