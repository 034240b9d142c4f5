"""Who can be measured, with which settings, and how one run of one of them is made. Knows rows; keeps no results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson
import uvloop

from harness.environments import DRIVERS, Environments
from harness.processes import ContestantError, CpuTimes, free_port, running_server
from harness.rows import Row, RowModel, warmup_requests
from ropeway.bench.client import Client, Endpoint
from ropeway.bench.load import LoadOptions, RequestRecord, Run, run_load
from ropeway.bench.report import Summary, summarise
from ropeway.bench.workload import BenchRequest

NUM_THREADS = 2
READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 1800.0
RAGGED_BLOCKS = 48  # of 16 tokens: the longest prompt and the longest output of a ragged row


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run: its figures, and how much of the machine others took meanwhile (share of all processors)."""

    summary: Summary
    disturbed_share: float


class Contestant(Protocol):
    """Something that can run a row."""

    name: str

    def measure(self, row: Row, seed: int) -> Measurement:
        """Starts, warms up, runs the row, stops. Raises: ContestantError when it fails or any answer is wrong."""
        ...


def checked(run: Run, name: str, disturbed_share: float) -> Measurement:
    """A run in which every request was answered as asked; anything else is no measurement."""
    summary = summarise(run, name)
    if summary.num_failed:
        raise ContestantError(f"{name}: {summary.num_failed} of {summary.num_requests} failed: {summary.failures}")
    return Measurement(summary, disturbed_share)


@dataclass(frozen=True, slots=True)
class HttpContestant:
    """A server with an OpenAI-compatible API, started by `command` with --port and the flags that a row asks for."""

    name: str
    command: tuple[str, ...]
    row_flags: Callable[[Row], tuple[str, ...]]
    log_path: Path
    extra_body: dict[str, Any]

    def measure(self, row: Row, seed: int) -> Measurement:
        port = free_port()
        command = (*self.command, "--port", str(port), *self.row_flags(row))
        with running_server(command, port, self.log_path, READY_TIMEOUT_S) as process_id:
            return uvloop.run(self._measure(row, seed, port, process_id))

    async def _measure(self, row: Row, seed: int, port: int, process_id: int) -> Measurement:
        client = Client(Endpoint.parse(f"http://127.0.0.1:{port}"), timeout_s=REQUEST_TIMEOUT_S)
        try:
            model = orjson.loads(await client.get("/v1/models"))["data"][0]["id"]
            options = LoadOptions(model=model, extra_body=self.extra_body)
            await run_load(client, warmup_requests(), options, concurrency=2)
            before = CpuTimes.now(process_id)
            run = await run_load(client, row.requests(seed), options, concurrency=row.concurrency)
            others_s = CpuTimes.now(process_id).others_since(before)
        finally:
            await client.close()
        return checked(run, self.name, others_s / run.duration_s / (os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class OpenVinoContestant:
    """OpenVINO GenAI's continuous batching, in process: a driver script runs the loop and writes what happened."""

    name: str
    interpreter: Path
    model: Path
    settings: dict[str, Any]
    log_path: Path

    def measure(self, row: Row, seed: int) -> Measurement:
        job = {
            "model": str(self.model),
            "num_threads": NUM_THREADS,
            "max_num_seqs": max(64, row.concurrency),
            "concurrency": row.concurrency,
            "settings": self.settings,
            "warmup": _plain(warmup_requests()),
            "requests": _plain(row.requests(seed)),
        }
        with self.log_path.open("wb") as log:
            answer = subprocess.run(
                [self.interpreter, DRIVERS / "openvino_loop.py"],
                input=orjson.dumps(job),
                stdout=subprocess.PIPE,
                stderr=log,
            )
        if answer.returncode != 0:
            tail = self.log_path.read_text(errors="replace")[-1500:]
            raise ContestantError(f"{self.name} ended with status {answer.returncode}:\n{tail}")
        result = orjson.loads(answer.stdout)
        records = tuple(
            RequestRecord(
                start_s=record["start_s"],
                end_s=record["times_s"][-1],
                chunk_times_s=tuple(record["times_s"]),
                num_prompt_tokens=len(request.prompt),
                num_output_tokens=record["num_tokens"],
                error=None if record["num_tokens"] == request.max_tokens else "wrong number of output tokens",
            )
            for record, request in zip(result["records"], row.requests(seed), strict=True)
        )
        run = Run(records, result["duration_s"], 0.0, None)
        others_s = max(0.0, result["machine_cpu_s"] - result["own_cpu_s"])
        return checked(run, self.name, others_s / run.duration_s / (os.cpu_count() or 1))


def _ropeway_flags(row: Row) -> tuple[str, ...]:
    flags = ("--max-num-seqs", str(max(row.concurrency, 32)))
    if row.concurrency > 32:  # a pool that holds them all to their ends, as the peers are given
        flags += ("--num-kv-blocks", str(row.concurrency * RAGGED_BLOCKS))
    return flags


def _llama_flags(setting: LlamaSetting) -> Callable[[Row], tuple[str, ...]]:
    def flags(row: Row) -> tuple[str, ...]:
        slots = max(1, round(row.concurrency * setting.slots_per_client))
        return ("--slots", str(slots), "--context-tokens", str(row.context_tokens), *setting.flags)

    return flags


def _plain(requests: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    return [{"prompt": request.prompt, "max_tokens": request.max_tokens} for request in requests]


@dataclass(frozen=True, slots=True)
class LlamaSetting:
    """flags of the driver; slots_per_client: sequences that may run, for each request in flight."""

    flags: tuple[str, ...] = ()
    slots_per_client: float = 1.0


# Settings tried in the sweep, per family; the first is what is used unless --settings or --settings-from names another.
LLAMA_SETTINGS: dict[str, LlamaSetting] = {
    "default": LlamaSetting(),
    "half-slots": LlamaSetting(slots_per_client=0.5),
    "ubatch-128": LlamaSetting(("--ubatch", "128")),
    "batch-ubatch-2048": LlamaSetting(("--batch", "2048", "--ubatch", "2048")),
    "flash-on": LlamaSetting(("--flash-attention", "enabled")),
    "flash-off": LlamaSetting(("--flash-attention", "disabled")),
    "kv-q8_0": LlamaSetting(("--kv-type", "q8_0", "--flash-attention", "enabled")),
    "unified-kv": LlamaSetting(("--unified-kv",)),
}
OPENVINO_SETTINGS: dict[str, dict[str, Any]] = {
    "budget-512": {"max_num_batched_tokens": 512},
    "budget-256": {"max_num_batched_tokens": 256},
    "budget-2048": {"max_num_batched_tokens": 2048},
    "kv-f16": {"max_num_batched_tokens": 512, "KV_CACHE_PRECISION": "f16"},
    "kv-u8": {"max_num_batched_tokens": 512, "KV_CACHE_PRECISION": "u8"},
    "no-split-fuse": {"max_num_batched_tokens": 4096, "dynamic_split_fuse": False},
    "throughput-hint": {"max_num_batched_tokens": 512, "PERFORMANCE_HINT": "THROUGHPUT"},
}
PEERS = ("llama-q4_0", "llama-q4_1", "openvino-int4", "openvino-int8")


def settings_of(name: str) -> tuple[str, ...]:
    """The names of the settings a peer can be run with, the usual one first."""
    return tuple(LLAMA_SETTINGS if name.startswith("llama") else OPENVINO_SETTINGS)


class Paddock:
    """Makes contestants by name, setting up what they need on first use."""

    def __init__(self, environments: Environments, model: Path, logs: Path, ropeway_options: Sequence[str]) -> None:
        self._environments = environments
        self._model = model
        self._logs = logs
        self._ropeway_options = tuple(ropeway_options)

    def contestant(self, name: str, row_model: RowModel, setting: str | None = None) -> Contestant:
        """`ropeway` or a peer, on the model of a row."""
        if name == "ropeway":
            return self._ropeway(row_model)
        setting = setting or settings_of(name)[0]
        log_path = self._logs / f"{name}.log"
        if name.startswith("llama"):
            return self._llama(name, row_model, LLAMA_SETTINGS[setting], log_path)
        assert row_model == "default", f"{name} has no copy of {row_model}"
        interpreter = self._environments.python("openvino")
        model = self._environments.openvino_model(self._model, name.removeprefix("openvino-"))
        return OpenVinoContestant(name, interpreter, model, OPENVINO_SETTINGS[setting], log_path)

    def _ropeway(self, row_model: RowModel) -> Contestant:
        model = self._model if row_model == "default" else self._environments.llama_1b_file()
        command = (sys.executable, "-m", "ropeway", "serve", str(model), "--num-threads", str(NUM_THREADS))
        command += ("--no-enable-prefix-caching", *self._ropeway_options)
        return HttpContestant("ropeway", command, _ropeway_flags, self._logs / "ropeway.log", {})

    def _llama(self, name: str, row_model: RowModel, setting: LlamaSetting, log_path: Path) -> Contestant:
        if row_model == "llama-1b":
            model = self._environments.llama_1b_file()
        else:
            model = self._model if name == "llama-q4_1" else self._environments.q4_0_file(self._model)
        command = (str(self._environments.python("llama")), str(DRIVERS / "llama_cpp_server.py"))
        command += ("--model", str(model), "--threads", str(NUM_THREADS))
        return HttpContestant(name, command, _llama_flags(setting), log_path, {"cache_prompt": False})
