"""Continuous against static batching: the same kernels, limits and requests, only the way of batching differs.

    make evidence-batching                       four spreads of output length, three seeds, under an hour
    python benchmarks/batching.py --quick        a look at it in a few minutes; writes no docs

In process, on one set of weights. All requests are there at the start, greedy, of full length; the mean output length
is the same in every row and only its spread (the sigma of the lognormal) grows. `static` forms a batch and computes
only unfinished members; `static-padded` computes finished ones too, as rectangular batches do. Gains are continuous
over static within one seed, the order of the three turning with the seed. At sigma 0 the gain must be about 1: nothing
ends early, so anything else would mean a crippled baseline.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.results import ROOT, markdown_table, open_document, save, spread
from ropeway.backends.batch import Backend
from ropeway.bench.load import RequestRecord, Run
from ropeway.bench.plot import Panel, Series, render_svg
from ropeway.bench.report import Summary, summarise
from ropeway.bench.workload import RAGGED_PROMPTS, BenchRequest, LengthDistribution, SyntheticWorkload
from ropeway.catalog import DEFAULT_MODEL, resolve_model
from ropeway.config import EngineConfig, EngineFacts, resolve
from ropeway.core.params import Request, SamplingParams
from ropeway.engine.engine import Engine
from ropeway.llm import make_backend, make_engine, model_facts, scheduler_recipe
from ropeway.machine_share import free_memory_bytes
from ropeway.model.loading import load_model

SIGMAS = (0.0, 0.5, 0.9, 1.3)
MODES = ("continuous", "static", "static-padded")
MEAN_OUTPUT, MAX_OUTPUT = 64, 256
TOKEN_BUDGET = 256
FAIR_GAIN = (0.9, 1.2)
DOCS_TABLE = ROOT / "docs" / "batching.md"
DOCS_PLOT = ROOT / "docs" / "batching.svg"


def requests_for(sigma: float, count: int, seed: int, vocab_size: int) -> list[BenchRequest]:
    """`count` requests whose output lengths sum to count x MEAN_OUTPUT whatever sigma is.

    Clipping at MAX_OUTPUT, and chance, would move the mean with sigma; the lengths are scaled back to it.
    """
    outputs = LengthDistribution(MEAN_OUTPUT, sigma, MAX_OUTPUT)
    first_token_id = min(100, vocab_size - 1)
    workload = SyntheticWorkload(RAGGED_PROMPTS, outputs, vocab_size=vocab_size, first_token_id=first_token_id)
    requests = workload.requests(count, seed)
    lengths = [request.max_tokens for request in requests]
    for _ in range(20):
        scale = MEAN_OUTPUT * count / sum(lengths)
        lengths = [min(MAX_OUTPUT, max(1, round(length * scale))) for length in lengths]
    return [replace(request, max_tokens=length) for request, length in zip(requests, lengths, strict=True)]


def run_all(engine: Engine, requests: list[BenchRequest]) -> Run:
    """Submits everything, steps until nothing is left, and records when each token came."""
    times_s: list[list[float]] = [[] for _ in requests]
    num_tokens = [0] * len(requests)
    start_s = time.perf_counter()
    for index, request in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        assert not isinstance(request.prompt, str)
        engine.submit(Request(str(index), request.prompt, params, request.max_tokens, seed=0))
    while engine.has_work:
        events = engine.step()
        now_s = time.perf_counter()
        for event in events:
            index = int(event.request_id)
            times_s[index].append(now_s)
            num_tokens[index] += len(event.token_ids)
    duration_s = time.perf_counter() - start_s
    records = tuple(
        RequestRecord(
            start_s=start_s,
            end_s=times[-1],
            chunk_times_s=tuple(times),
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=count,
            error=None if count == request.max_tokens else f"asked for {request.max_tokens} tokens, got {count}",
        )
        for request, times, count in zip(requests, times_s, num_tokens, strict=True)
    )
    return Run(records, duration_s, 0.0, None)


class Bench:
    """One backend, on which an engine per way of batching is made anew for each run."""

    def __init__(self, args: argparse.Namespace) -> None:
        path = resolve_model(args.model)
        loaded = load_model(path)
        blocks_per_sequence = -(-(RAGGED_PROMPTS.maximum + MAX_OUTPUT) // 16)
        config = EngineConfig(
            max_model_len=RAGGED_PROMPTS.maximum + MAX_OUTPUT,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=TOKEN_BUDGET,
            num_kv_blocks=args.max_num_seqs * blocks_per_sequence,
            num_threads=args.num_threads,
            backend=args.backend,
            enable_prefix_caching=False,  # the baselines have none
        )
        facts = resolve(config, model_facts(path.stem, loaded, config), free_memory_bytes())
        self.facts: EngineFacts = facts
        self.vocab_size = loaded.program.vocab_size
        self._num_cache_groups = len(loaded.program.cache_groups)
        self._backend: Backend = make_backend(loaded, self.facts)

    def measure(self, mode: Any, requests: list[BenchRequest]) -> dict[str, Any]:
        """One run: figures, and what the engine counted."""
        facts = replace(self.facts, batching=mode)
        engine = make_engine(self._backend, scheduler_recipe(facts, num_cache_groups=self._num_cache_groups))
        summary: Summary = summarise(run_all(engine, requests), mode)
        if summary.num_failed:
            raise SystemExit(f"{mode}: {summary.num_failed} requests were not answered in full: {summary.failures}")
        stats = engine.stats()
        return {
            "summary": summary.to_dict(),
            "num_steps": stats.num_steps,
            "num_padding_tokens": stats.num_padding_tokens,
            "num_preemptions": stats.num_preemptions,
        }


def run(args: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Every (sigma, seed, mode) that the result file does not hold yet; the document, and where it lies."""
    bench = Bench(args)
    options = {
        "num_requests": args.num_requests,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": bench.facts.max_num_batched_tokens,
        "num_kv_blocks": bench.facts.num_kv_blocks,
        "mean_output_tokens": MEAN_OUTPUT,
        "max_output_tokens": MAX_OUTPUT,
    }
    document, path = open_document(args.resume, "batching", options, "runs")
    done = {(item["sigma"], item["seed"], item["mode"]) for item in document["runs"]}
    bench.measure("continuous", requests_for(0.0, 4, 2**31, bench.vocab_size))  # warm caches and pages
    plan = [
        (sigma, seed, mode)
        for position, seed in enumerate(args.seeds)
        for sigma in args.sigmas
        for mode in (*MODES[position % 3 :], *MODES[: position % 3])
    ]
    for number, key in enumerate(plan, 1):
        if key in done:
            continue
        sigma, seed, mode = key
        result = bench.measure(mode, requests_for(sigma, args.num_requests, seed, bench.vocab_size))
        summary = result["summary"]
        print(
            f"{number:>2} of {len(plan)}: sigma {sigma:.1f} seed {seed} {mode:<13} "
            f"{summary['output_tokens_per_s']:8.1f} output tok/s, {result['num_steps']} steps, "
            f"{summary['duration_s']:.1f} s",
            flush=True,
        )
        document["runs"].append({"sigma": sigma, "seed": seed, "mode": mode, **result})
        save(path, document)
    print(f"\n{path}")
    return document, path


def rates(document: dict[str, Any], sigma: float, mode: str) -> dict[int, float]:
    """Output tokens/s by seed."""
    return {
        item["seed"]: item["summary"]["output_tokens_per_s"]
        for item in document["runs"]
        if item["sigma"] == sigma and item["mode"] == mode
    }


def sigmas_of(document: dict[str, Any]) -> set[float]:
    return {item["sigma"] for item in document["runs"]}


def gains(document: dict[str, Any], sigma: float, mode: str) -> list[float]:
    """Continuous over `mode`, seed by seed."""
    ours, theirs = rates(document, sigma, "continuous"), rates(document, sigma, mode)
    return [ours[seed] / theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def median_latency(document: dict[str, Any], sigma: float, mode: str, latency: str, point: str) -> float:
    return statistics.median(
        item["summary"][latency][point] for item in document["runs"] if item["sigma"] == sigma and item["mode"] == mode
    )


def format_table(document: dict[str, Any]) -> str:
    lines = []
    for sigma in sorted(sigmas_of(document)):
        for mode in MODES:
            if mode == "continuous":
                gain = "1"
            else:
                middle, low, high = spread(gains(document, sigma, mode))
                gain = f"{middle:.2f} ({low:.2f}–{high:.2f})"
            lines.append(
                [
                    f"{sigma:.1f}",
                    mode,
                    f"{statistics.median(rates(document, sigma, mode).values()):.0f}",
                    gain,
                    *(
                        f"{median_latency(document, sigma, mode, latency, point):,.0f}"
                        for latency in ("ttft", "tpot", "e2el")
                        for point in ("p50", "p99")
                    ),
                ]
            )
    header = ("σ of output length", "batching", "output tok/s", "gain of continuous (range)", "TTFT p50, ms", "p99")
    return markdown_table((*header, "TPOT p50, ms", "p99 ", "E2EL p50, ms", "p99  "), lines)


def plot(document: dict[str, Any]) -> str:
    def series(mode: str, value: Any) -> Series:
        return Series(mode, tuple((sigma, value(sigma, mode)) for sigma in SIGMAS))

    panels = [
        Panel(
            "Throughput",
            "sigma of the output length (lognormal)",
            "output tokens/s",
            tuple(
                series(mode, lambda sigma, mode: statistics.median(rates(document, sigma, mode).values()))
                for mode in MODES
            ),
        ),
        Panel(
            "Gain of continuous batching",
            "sigma of the output length (lognormal)",
            "times the output tokens/s",
            tuple(
                series(f"over {mode}", lambda sigma, name: statistics.median(gains(document, sigma, name[5:])))
                for mode in MODES[1:]
            ),
        ),
    ]
    return render_svg("Continuous and static batching, same kernels and limits", panels)


def write_docs(document: dict[str, Any], path: Path) -> None:
    machine, options = document["machine"], document["options"]
    DOCS_PLOT.write_text(plot(document))
    DOCS_TABLE.write_text(
        "# Continuous and static batching\n\n"
        "The same kernels, limits and requests; only the way of batching differs. "
        f"{options['num_requests']} requests, all there at the start, mean output {options['mean_output_tokens']} "
        f"tokens (at most {options['max_output_tokens']}), prompts of the ragged workload, at most "
        f"{options['max_num_seqs']} sequences and {options['max_num_batched_tokens']} tokens per step. Medians over "
        f"{len({item['seed'] for item in document['runs']})} seeds; a gain is taken within a seed.\n\n"
        f'`make evidence-batching ARGS="--num-requests {options["num_requests"]}"` '
        f"([results](../benchmarks/results/{path.name})), {document['date'][:10]}, commit {document['commit'][:8]}, "
        f"{machine['processor']}, "
        f"{machine['num_cpus']} cores, load average at the start {machine['load_average'][0]:.1f}.\n\n"
        f"{format_table(document)}\n\n![Throughput and gain against the spread of output lengths](batching.svg)\n"
    )


def check_baseline(document: dict[str, Any]) -> bool:
    """Whether the baseline is a fair one: at sigma 0 nothing ends early, so continuous gains next to nothing."""
    if 0.0 not in sigmas_of(document):
        return True
    fair = True
    for mode in MODES[1:]:
        gain = statistics.median(gains(document, 0.0, mode))
        if not FAIR_GAIN[0] <= gain <= FAIR_GAIN[1]:
            fair = False
            print(f"the gain over {mode} at sigma 0 is {gain:.2f}, outside {FAIR_GAIN}: not a fair baseline")
    return fair


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name or the path of a GGUF file")
    parser.add_argument("--num-requests", type=int, default=192, help="requests per run")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="sequences running at once, at most")
    parser.add_argument("--num-threads", type=int, help="of the native backend; all cores if not given")
    parser.add_argument("--backend", choices=("native", "reference"), default="native")
    parser.add_argument("--sigmas", type=float, nargs="+", choices=SIGMAS, default=list(SIGMAS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with the runs missing from this result file")
    parser.add_argument("--quick", action="store_true", help="one seed, 64 requests, no docs written")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.num_requests = args.seeds[:1], 64
    document, path = run(args)
    print(format_table(document))
    if not args.quick and set(SIGMAS) == sigmas_of(document):
        write_docs(document, path)
    return 0 if check_baseline(document) else 1


if __name__ == "__main__":
    sys.exit(main())
