"""The arithmetic of `benchmarks/overheads.py`: what is planned, read and judged. Nothing is timed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

import overheads
from harness import results
from ropeway.bench.workload import BenchRequest

RUN = {
    "output_tokens_per_s": 400.0, "overhead_share": 0.02, "overhead_us_per_sequence": 7.0, "lock_wait_share": 0.0,
    "lock_wait_p50_us": 2.0, "lock_wait_p99_us": 30.0, "event_loop_us_per_token": 50.0,
    "memory_bytes": {"resident": 500_000_000},
}  # fmt: skip


def perform(kind: str, concurrency: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    if kind == "start":
        return {"ready_s": 1.0 + seed, "cpu_s": 1.5, "memory_bytes": {"resident": 250_000_000}}
    if kind == "in-process":
        return {"output_tokens_per_s": 410.0 + seed, "packed_bytes": 100_000_000, "kv_bytes": 300_000_000}
    return RUN | {"output_tokens_per_s": 160.0 if kind == "busy-core" else 400.0}


def arguments(**changes: Any) -> argparse.Namespace:
    fields = {"parts": ["start", "throughput"], "seeds": [0, 1, 2], "num_requests": None, "num_threads": 2}
    return argparse.Namespace(**(fields | {"max_num_batched_tokens": 192, "isa": None, "resume": None} | changes))


def test_runs_alternate_and_targets_are_judged_by_the_median(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "overheads.json"
    monkeypatch.setattr(results, "result_path", lambda document: path)
    assert overheads.run_all(arguments(), perform) == 1, "the third start of five takes 3 s, and a busy core costs more"
    document = orjson.loads(path.read_bytes())
    assert len(document["runs"]) == 5 + 3 * 5
    kinds = [(run["kind"], run["concurrency"]) for run in document["runs"] if run["kind"] != "start"]
    assert kinds[5:10] == kinds[:5][::-1] and kinds[10:] == kinds[:5]
    assert document["figures"]["http_over_in_process_c32"] == pytest.approx([400 / 411, 400 / 412, 400 / 410])
    assert document["figures"]["excess_mb"][0] == pytest.approx(100.0)
    verdicts = {
        cells[1].strip(): cells[-2].strip()
        for line in capsys.readouterr().out.splitlines()
        if (cells := line.split("|"))[0] == "" and len(cells) == 7
    }
    missed = [figure for figure, verdict in verdicts.items() if verdict == "miss"]
    assert missed == [
        "one core taken by another process, c=32: output tok/s", "ready after `ropeway serve`, s",
    ]  # fmt: skip
    assert len([figure for figure, verdict in verdicts.items() if verdict == "pass"]) == len(overheads.TARGETS) - 2


def test_resuming_does_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "overheads.json"
    monkeypatch.setattr(results, "result_path", lambda document: path)
    overheads.run_all(arguments(seeds=[0], parts=["throughput"]), perform)
    done: list[int] = []

    def count(kind: str, concurrency: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
        done.append(seed)
        return perform(kind, concurrency, seed, args)

    overheads.run_all(arguments(seeds=[0, 1], parts=["throughput"], resume=path), count)
    assert done == [1] * 5


def test_metrics_are_read_with_their_labels() -> None:
    text = (
        '# HELP x\nropeway:native_seconds_total{model_name="m"} 2.5\nprocess_cpu_seconds_total 9.0\n'
        'ropeway:interpreter_lock_wait_seconds{model_name="m",quantile="0.99"} 1e-05\n'
    )
    assert overheads.read_metrics(text) == {
        "native_seconds_total": 2.5,
        'interpreter_lock_wait_seconds{quantile="0.99"}': 1e-5,
    }


def test_processor_time_and_memory_of_a_process_are_found() -> None:
    before_s = overheads.thread_cpu_s(os.getpid())
    sum(range(2_000_000))
    assert overheads.thread_cpu_s(os.getpid()) > before_s
    memory = overheads.memory_bytes(os.getpid())
    assert memory["resident"] >= memory["anonymous"] > 1 << 20


def test_in_process_makes_the_requests_of_the_workload(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 256, "num_threads": 1}
    requests = [BenchRequest([5] * 9, 7), BenchRequest([6] * 20, 4)]
    monkeypatch.setattr(overheads, "requests_for", lambda concurrency, seed, num_requests: requests)
    job = {"model": str(tiny_model_path), "options": options, "seed": 3, "concurrency": 4, "num_requests": 2}
    answer = overheads.do_job(job)
    assert answer["output_tokens_per_s"] > 0 and answer["packed_bytes"] > 0
    assert answer["kv_bytes"] > 0
