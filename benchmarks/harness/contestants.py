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
from harness.rows import Row, warmup_requests
from ropeway.bench.client import Client, Endpoint
from ropeway.bench.load import LoadOptions, RequestRecord, Run, run_load
from ropeway.bench.report import Summary, summarise
from ropeway.bench.workload import BenchRequest

NUM_THREADS = 2
READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 1800.0


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
    return ("--max-num-seqs", str(max(row.concurrency, 32)))


def _llama_flags(row: Row) -> tuple[str, ...]:
    return ("--slots", str(row.concurrency), "--context-tokens", str(row.context_tokens))


def _plain(requests: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    return [{"prompt": request.prompt, "max_tokens": request.max_tokens} for request in requests]


# Settings tried in the sweep, per family; the first is what is used unless --setting names another.
LLAMA_SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "ubatch-128": ("--ubatch", "128"),
    "ubatch-2048": ("--ubatch", "2048"),
    "flash-on": ("--flash-attention", "enabled"),
    "flash-off": ("--flash-attention", "disabled"),
    "kv-q8_0": ("--kv-type", "q8_0", "--flash-attention", "enabled"),
    "unified-kv": ("--unified-kv",),
}
OPENVINO_SETTINGS: dict[str, dict[str, Any]] = {
    "budget-512": {"max_num_batched_tokens": 512},
    "budget-256": {"max_num_batched_tokens": 256},
    "budget-2048": {"max_num_batched_tokens": 2048},
    "kv-f16": {"max_num_batched_tokens": 512, "KV_CACHE_PRECISION": "f16"},
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

    def ropeway(self) -> Contestant:
        command = (sys.executable, "-m", "ropeway", "serve", str(self._model), "--num-threads", str(NUM_THREADS))
        command += ("--no-enable-prefix-caching", *self._ropeway_options)
        return HttpContestant("ropeway", command, _ropeway_flags, self._logs / "ropeway.log", {})

    def peer(self, name: str, setting: str | None = None) -> Contestant:
        setting = setting or settings_of(name)[0]
        log_path = self._logs / f"{name}.log"
        if name.startswith("llama"):
            interpreter = self._environments.python("llama")
            model = self._model if name == "llama-q4_1" else self._environments.q4_0_file(self._model)
            command = (str(interpreter), str(DRIVERS / "llama_cpp_server.py"), "--model", str(model))
            command += ("--threads", str(NUM_THREADS), *LLAMA_SETTINGS[setting])
            return HttpContestant(name, command, _llama_flags, log_path, {"cache_prompt": False})
        weights = name.removeprefix("openvino-")
        interpreter = self._environments.python("openvino")
        return OpenVinoContestant(
            name,
            interpreter,
            self._environments.openvino_model(self._model, weights),
            OPENVINO_SETTINGS[setting],
            log_path,
        )
