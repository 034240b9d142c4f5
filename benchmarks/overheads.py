"""What Ropeway costs around its kernels: engine thread, interpreter lock, text and HTTP, busy neighbour, start, memory.

    python benchmarks/overheads.py                        everything, three seeds (about 20 minutes)
    python benchmarks/overheads.py --parts start          readiness and memory only
    python benchmarks/overheads.py --num-requests 48 --seeds 0    a quick look

Runs alternate: HTTP, in process, HTTP beside a process that keeps one core busy; each with the same seeded requests. In
process means `LLM.generate_each` with no event loop and no HTTP. The load generator shares the machine with the server,
as everywhere here. Every run goes to benchmarks/results/ as it ends; --resume goes on from there.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import orjson
import uvloop

from harness.processes import CpuTimes, cpu_s_of, free_port, running_server
from harness.results import ROOT, markdown_table, open_document, save
from harness.rows import VOCAB_SIZE
from ropeway.bench.client import Client, Endpoint
from ropeway.bench.load import LoadOptions, run_load
from ropeway.bench.report import summarise
from ropeway.bench.workload import BenchRequest, SyntheticWorkload, default_num_requests
from ropeway.catalog import DEFAULT_MODEL, resolve_model

PARTS = ("throughput", "start")
CONCURRENCIES = (32, 128)
NUM_STARTS = 5
MEMORY_BLOCKS = 512  # a pool small enough that a run at c=32 touches all of it
ALLOWANCE_BYTES = 150e6
READY_TIMEOUT_S = 120.0
_METRIC = re.compile(r"^ropeway:(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)

# (figure, what it is, target, whether it must be at least that)
TARGETS: tuple[tuple[str, str, float, bool], ...] = (
    ("overhead_share", "engine thread between native calls, c=32: share of the step", 0.03, False),
    ("overhead_us_per_sequence", "the same, µs per running sequence", 8.0, False),
    ("event_loop_us_per_token", "detokenise + HTTP, c=32: µs of CPU per streamed token", 60.0, False),
    ("http_over_in_process_c32", "HTTP over in process, c=32: output tok/s", 0.95, True),
    ("http_over_in_process_c128", "HTTP over in process, c=128: output tok/s", 0.95, True),
    ("busy_core_over_quiet", "one core taken by another process, c=32: output tok/s", 0.45, True),
    ("ready_s", "ready after `ropeway serve`, s", 2.5, False),
    ("excess_mb", "resident memory beyond packed weights and KV pool, after c=32, MB", 150.0, False),
)


def requests_for(concurrency: int, seed: int, num_requests: int | None) -> list[BenchRequest]:
    workload = SyntheticWorkload(vocab_size=VOCAB_SIZE)
    return workload.requests(num_requests or default_num_requests(concurrency), seed)


def engine_flags(concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    blocks = MEMORY_BLOCKS if concurrency == 32 else concurrency * 48
    budget = args.max_num_batched_tokens
    return {
        "max_num_seqs": concurrency,
        "max_num_batched_tokens": budget,
        "num_kv_blocks": blocks,
        "num_threads": args.num_threads,
        **({} if args.isa is None else {"isa": args.isa}),
    }


def serve_command(model: str, flags: dict[str, Any], port: int) -> list[str]:
    named = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "ropeway", "serve", model, "--port", str(port), *named]


def read_metrics(text: str) -> dict[str, float]:
    """name, or name{labels but the model's}, -> value."""
    found = {}
    for name, labels, value in _METRIC.findall(text):
        kept = ",".join(label for label in labels.split(",") if not label.startswith("model_name"))
        found[f"{name}{{{kept}}}" if kept else name] = float(value)
    return found


def thread_cpu_s(process_id: int) -> float:
    """Processor seconds of the process's main thread, which runs the event loop; Linux's own nanoseconds."""
    return int(Path(f"/proc/{process_id}/task/{process_id}/schedstat").read_text().split()[0]) * 1e-9


def memory_bytes(process_id: int) -> dict[str, int]:
    """VmRSS and its parts, of a process."""
    status = Path(f"/proc/{process_id}/status").read_text()
    names = {"VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "file"}
    return {names[name]: int(kib) << 10 for name, kib in re.findall(r"^(VmRSS|RssAnon|RssFile):\s+(\d+)", status, re.M)}


def run_http(concurrency: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    command = serve_command(args.model, engine_flags(concurrency, args), port)
    with running_server(command, port, args.log, READY_TIMEOUT_S) as process_id:
        return uvloop.run(_load(concurrency, seed, args, port, process_id))


async def _load(concurrency: int, seed: int, args: argparse.Namespace, port: int, process_id: int) -> dict[str, Any]:
    client = Client(Endpoint.parse(f"http://127.0.0.1:{port}"), timeout_s=1800.0)
    try:
        name = orjson.loads(await client.get("/v1/models"))["data"][0]["id"]
        options = LoadOptions(model=name)
        await run_load(client, requests_for(1, 2**31, 2), options, concurrency=2)
        before, cpu_before_s = read_metrics((await client.get("/metrics")).decode()), thread_cpu_s(process_id)
        machine_before = CpuTimes.now(process_id)
        requests = requests_for(concurrency, seed, args.num_requests)
        run = await run_load(client, requests, options, concurrency=concurrency)
        cpu_s, others_s = thread_cpu_s(process_id) - cpu_before_s, CpuTimes.now(process_id).others_since(machine_before)
        after = read_metrics((await client.get("/metrics")).decode())
        memory = memory_bytes(process_id)
    finally:
        await client.close()
    summary = summarise(run, f"http c={concurrency}")
    if summary.num_failed:
        raise SystemExit(f"{summary.num_failed} of {summary.num_requests} requests failed: {summary.failures}")
    delta = {key: after[key] - before[key] for key in after if key in before}
    outside_s = delta["step_seconds_total"] - delta["native_seconds_total"]
    return {
        "output_tokens_per_s": summary.output_tokens_per_s,
        "overhead_share": outside_s / delta["step_seconds_total"],
        "overhead_us_per_sequence": 1e6 * outside_s / delta["step_sequences_total"],
        "lock_wait_share": delta["interpreter_lock_wait_seconds_sum"] / delta["step_seconds_total"],
        "lock_wait_p50_us": 1e6 * after['interpreter_lock_wait_seconds{quantile="0.5"}'],
        "lock_wait_p99_us": 1e6 * after['interpreter_lock_wait_seconds{quantile="0.99"}'],
        "event_loop_us_per_token": 1e6 * cpu_s / delta["generation_tokens_total"],
        "num_steps": delta["engine_steps_total"],
        "memory_bytes": memory,
        "others_share": others_s / run.duration_s / (os.cpu_count() or 1),
        "summary": summary.to_dict(),
    }


def run_in_process(concurrency: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, so that it begins as a server does."""
    job = {"model": args.model, "options": engine_flags(concurrency, args), "seed": seed, "concurrency": concurrency}
    command = [sys.executable, __file__, "--job", orjson.dumps(job | {"num_requests": args.num_requests}).decode()]
    answer: dict[str, Any] = orjson.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


def do_job(job: dict[str, Any]) -> dict[str, Any]:
    """The other side of `run_in_process`."""
    from ropeway import LLM, SamplingParams
    from ropeway.backends.native import NativeBackend

    def items(requests: Sequence[BenchRequest]) -> list[tuple[Any, SamplingParams]]:
        return [
            (list(request.prompt), SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True))
            for request in requests
        ]

    llm = LLM(job["model"], **job["options"])
    list(llm.generate_each(items(requests_for(1, 2**31, 2))))
    wanted = items(requests_for(job["concurrency"], job["seed"], job["num_requests"]))
    start_s = time.perf_counter()
    num_tokens = sum(len(output.outputs[0].token_ids) for _, output in llm.generate_each(wanted))
    duration_s = time.perf_counter() - start_s
    assert num_tokens == sum(params.max_tokens or 0 for _, params in wanted)
    backend = llm._loaded.backend
    assert isinstance(backend, NativeBackend)
    return {
        "output_tokens_per_s": num_tokens / duration_s,
        "packed_bytes": backend.packed_bytes,
        "kv_bytes": backend.kv_bytes,
    }


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that computes on one core, the last of those that this process may use, until the block ends."""
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_start(number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the start of `ropeway serve` until it says that it accepts connections; processor time and memory
    until then.
    """
    command = [sys.executable, "-m", "ropeway", "serve", args.model, "--port", "0"]
    with args.log.open("wb") as log:
        start_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "curl" in line:
                    break
            else:
                raise SystemExit(f"the server ended before it was ready; see {args.log}")
            ready_s = time.perf_counter() - start_s
            return {"ready_s": ready_s, "cpu_s": cpu_s_of(process.pid), "memory_bytes": memory_bytes(process.pid)}
        finally:
            process.terminate()
            process.wait()


def planned(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(kind, concurrency, seed) of every run, in turning order."""
    runs: list[tuple[str, int, int]] = []
    if "start" in args.parts:
        runs += [("start", 0, number) for number in range(NUM_STARTS)]
    if "throughput" in args.parts:
        for seed in args.seeds:
            kinds = [("http", 32), ("in-process", 32), ("busy-core", 32), ("http", 128), ("in-process", 128)]
            runs += [(kind, c, seed) for kind, c in (kinds if seed % 2 == 0 else reversed(kinds))]
    return runs


def perform(kind: str, concurrency: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    if kind == "start":
        return run_start(seed, args)
    if kind == "in-process":
        return run_in_process(concurrency, seed, args)
    with busy_core() if kind == "busy-core" else nullcontext():
        return run_http(concurrency, seed, args)


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """Median, least and greatest of every figure that the runs give; ratios are taken within a seed."""
    by_key = {(run["kind"], run["concurrency"], run["seed"]): run for run in runs}

    def ratios(kind: str, base: str, concurrency: int) -> list[float]:
        return [
            run["output_tokens_per_s"] / by_key[base, c, seed]["output_tokens_per_s"]
            for (found, c, seed), run in by_key.items()
            if (found, c) == (kind, concurrency) and (base, c, seed) in by_key
        ]

    http = [run for run in runs if (run["kind"], run["concurrency"]) == ("http", 32)]
    in_process = [run for run in runs if (run["kind"], run["concurrency"]) == ("in-process", 32)]
    names = ("overhead_share", "overhead_us_per_sequence", "event_loop_us_per_token", "lock_wait_p50_us")
    values = {name: [run[name] for run in http] for name in (*names, "lock_wait_p99_us")}
    values["start_cpu_s"] = [run["cpu_s"] for run in runs if run["kind"] == "start"]
    values["ready_s"] = [run["ready_s"] for run in runs if run["kind"] == "start"]
    for concurrency in CONCURRENCIES:
        values[f"http_over_in_process_c{concurrency}"] = ratios("http", "in-process", concurrency)
    values["busy_core_over_quiet"] = ratios("busy-core", "http", 32)
    if in_process:
        held = in_process[0]["packed_bytes"] + in_process[0]["kv_bytes"]
        values["excess_mb"] = [(run["memory_bytes"]["resident"] - held) / 1e6 for run in http]
        packed = in_process[0]["packed_bytes"]
        starts = [run for run in runs if run["kind"] == "start"]
        values["start_excess_mb"] = [(run["memory_bytes"]["resident"] - packed) / 1e6 for run in starts]
    return {name: (statistics.median(v), min(v), max(v)) for name, v in values.items() if v}


def format_figures(runs: Sequence[dict[str, Any]]) -> str:
    """Every figure with its range, its target and whether the median met it; then what is only reported."""
    found = figures(runs)
    lines = []
    for name, what, target, is_least in TARGETS:
        if name not in found:
            continue
        middle, low, high = found[name]
        verdict = "pass" if (middle >= target if is_least else middle <= target) else "miss"
        bound = f"{'≥' if is_least else '≤'} {target:g}"
        lines.append([what, f"{middle:.3g}", f"{low:.3g}–{high:.3g}", bound, verdict])
    for name, what in (
        ("lock_wait_p50_us", "interpreter-lock reacquisition, c=32: p50, µs"),
        ("lock_wait_p99_us", "interpreter-lock reacquisition, c=32: p99, µs"),
        ("start_cpu_s", "processor time until ready, s"),
        ("start_excess_mb", "resident memory beyond packed weights when ready, MB"),
    ):
        if name in found:
            middle, low, high = found[name]
            lines.append([what, f"{middle:.3g}", f"{low:.3g}–{high:.3g}", "", ""])
    return markdown_table(("figure", "median", "range", "target", ""), lines)


def run_all(args: argparse.Namespace, perform: Callable[..., dict[str, Any]] = perform) -> int:
    """Whatever is missing of the plan; 0, or 1 where a target is missed."""
    options = {"seeds": args.seeds, "num_requests": args.num_requests, "num_threads": args.num_threads}
    options |= {"max_num_batched_tokens": args.max_num_batched_tokens, "isa": args.isa}
    document, path = open_document(args.resume, "overheads", options, "runs")
    runs: list[dict[str, Any]] = document["runs"]
    done = {(run["kind"], run["concurrency"], run["seed"]) for run in runs}
    waiting = [each for each in planned(args) if each not in done]
    for number, (kind, concurrency, seed) in enumerate(waiting, 1):
        start_s = time.monotonic()
        run = perform(kind, concurrency, seed, args)
        runs.append({"kind": kind, "concurrency": concurrency, "seed": seed, **run})
        save(path, document | {"figures": figures(runs)})
        shown = "  ".join(f"{name} {value:.3g}" for name, value in run.items() if isinstance(value, float))
        what = f"{kind} c={concurrency} seed {seed}" if concurrency else f"{kind} {seed}"
        taken_s = time.monotonic() - start_s
        print(f"{number} of {len(waiting)}: {what}: {shown}  ({taken_s:.0f} s)", flush=True)
    table = format_figures(runs)
    print(f"\n{table}\n\n{path}")
    return 1 if "miss" in table else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--num-requests", type=int, help="per run, for a quick look; a claim needs the default")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--isa", help="instruction set of the native kernels; the best this processor has if not given")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=192, help="fixed, so that both sides plan the same (default 192)"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with the runs missing from this result file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        sys.stdout.buffer.write(orjson.dumps(do_job(orjson.loads(args.job))))
        return 0
    resolve_model(args.model)  # fetched before anything is timed
    args.log = ROOT / "build" / "overheads.log"
    args.log.parent.mkdir(exist_ok=True)
    return run_all(args)


if __name__ == "__main__":
    sys.exit(main())
