"""Running answers while long prompts stream in: gaps between tokens, and the speed that prompts keep.

    make evidence-interference                      1, 8 and 32 running, three rounds, about half an hour
    python benchmarks/interference.py --quick       one round, shorter prompts, a few minutes

In process, on one set of weights. In each round and for each number of running answers: their gaps while nothing else
is there, then while prompts stream in (two at a time, each of one token of answer), then undisturbed again. The prompts
alone are timed in the same round. So a machine that is busy is busy for both sides of each ratio. Greedy, random
tokens, no prefix cache. Targets: the p99 of gaps within 2.5 x their undisturbed median, and the prompts at 0.4 x the
tokens per second they have alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.results import open_document, save
from ropeway.calibration import calibrate_step_costs
from ropeway.catalog import DEFAULT_MODEL
from ropeway.config import EngineConfig
from ropeway.core.params import Request, SamplingParams
from ropeway.engine.engine import Engine
from ropeway.llm import make_engine, prepare_model, scheduler_recipe

COUNTS = (1, 8, 32)
LENGTHS, QUICK_LENGTHS = (500, 2000, 8000, 500, 2000), (300, 1500)
MOST_GAP, LEAST_SPEED = 2.5, 0.4
RUNNING_PROMPT_TOKENS = 64
NUM_UNDISTURBED_STEPS = 100
NUM_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round at one number of running answers. Seconds, and prompt tokens per second."""

    round: int
    num_running: int
    undisturbed_median_s: float
    undisturbed_p99_s: float
    disturbed_p50_s: float
    disturbed_p99_s: float
    disturbed_max_s: float
    num_disturbed_steps: int
    prompt_tokens_per_s: float
    alone_tokens_per_s: float
    predicted_over_achieved: float

    @property
    def gap_ratio(self) -> float:
        return self.disturbed_p99_s / self.undisturbed_median_s

    @property
    def speed_ratio(self) -> float:
        return self.prompt_tokens_per_s / self.alone_tokens_per_s


class Bench:
    """A loaded model, and engines on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        config = EngineConfig(
            num_threads=args.num_threads, backend=args.backend, objective=args.objective, kv_cache_memory=args.kv_cache
        )
        prepared = prepare_model(args.model, config)
        self._backend, self.facts = prepared.backend, prepared.facts
        self._num_groups = len(prepared.model.program.cache_groups)
        self._vocab_size = prepared.model.program.vocab_size
        self.costs = calibrate_step_costs(self._backend, prepared.model.program, self.facts)
        self.lengths = [min(length, self.facts.max_model_len - 2) for length in args.lengths]
        self._number = 0

    def engine(self) -> Engine:
        return make_engine(
            self._backend, scheduler_recipe(self.facts, num_cache_groups=self._num_groups, costs=self.costs)
        )

    def request(self, rng: random.Random, num_prompt_tokens: int, max_tokens: int) -> Request:
        self._number += 1
        prompt = tuple(rng.randrange(100, self._vocab_size) for _ in range(num_prompt_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return Request(str(self._number), prompt, params, max_tokens, seed=0)

    def stream(self, engine: Engine, rng: random.Random) -> tuple[float, list[float]]:
        """Prompts stream in until all are answered: seconds from the first to the last, and each step's gap."""
        coming = [self.request(rng, length, 1) for length in self.lengths]
        open_ids: set[str] = set()
        gaps: list[float] = []
        start_s = last_s = time.perf_counter()
        while coming or open_ids:
            while coming and len(open_ids) < NUM_IN_FLIGHT:
                open_ids.add(coming[0].request_id)
                engine.submit(coming.pop(0))
            events = engine.step()
            now_s = time.perf_counter()
            gaps.append(now_s - last_s)
            last_s = now_s
            open_ids -= {event.request_id for event in events if event.finish_reason}
        return last_s - start_s, gaps

    def measure(self, round_number: int, num_running: int, seed: int) -> Outcome:
        rng = random.Random(seed)
        num_prompt_tokens = sum(self.lengths)
        alone_s, _ = self.stream(self.engine(), random.Random(seed + 1))
        engine = self.engine()
        longest = self.facts.max_model_len - RUNNING_PROMPT_TOKENS
        for _ in range(num_running):
            engine.submit(self.request(rng, RUNNING_PROMPT_TOKENS, longest))
        while engine.stats().num_generation_tokens < 2 * num_running:
            engine.step()
        calm = undisturbed(engine)
        streamed_s, gaps = self.stream(engine, random.Random(seed + 1))
        calm += undisturbed(engine)
        pacing = engine.stats().pacing
        assert pacing is not None
        return Outcome(
            round_number,
            num_running,
            statistics.median(calm),
            percentile_99(calm),
            statistics.median(gaps),
            percentile_99(gaps),
            max(gaps),
            len(gaps),
            num_prompt_tokens / streamed_s,
            num_prompt_tokens / alone_s,
            pacing.predicted_s / pacing.achieved_s,
        )


def percentile_99(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


def undisturbed(engine: Engine) -> list[float]:
    """Seconds of steps in which only the running answers decode."""
    gaps = []
    for _ in range(NUM_UNDISTURBED_STEPS):
        start_s = time.perf_counter()
        engine.step()
        gaps.append(time.perf_counter() - start_s)
    return gaps


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every (round, number running) that the result file does not hold yet."""
    bench = Bench(args)
    options = {
        "objective": args.objective,
        "prompt_lengths": bench.lengths,
        "counts": list(args.counts),
        "seed": args.seed,
        "step_costs": asdict(bench.costs),
    }
    document, path = open_document(args.resume, "interference", options, "runs")
    done = {(item["round"], item["num_running"]) for item in document["runs"]}
    print("round  running  undisturbed ms  p50 ms   p99 ms  p99 ratio  prompt tok/s   alone  ratio", flush=True)
    for number in range(args.rounds):
        for count in args.counts:
            if (number, count) in done:
                continue
            outcome = bench.measure(number, count, args.seed + number)
            document["runs"].append(
                asdict(outcome) | {"gap_ratio": outcome.gap_ratio, "speed_ratio": outcome.speed_ratio}
            )
            save(path, document)
            print(
                f"{number:>5} {count:>8} {outcome.undisturbed_median_s * 1000:>15.1f} "
                f"{outcome.disturbed_p50_s * 1000:>7.1f} {outcome.disturbed_p99_s * 1000:>8.1f} "
                f"{outcome.gap_ratio:>10.2f} {outcome.prompt_tokens_per_s:>13.0f} {outcome.alone_tokens_per_s:>7.0f} "
                f"{outcome.speed_ratio:>6.2f}",
                flush=True,
            )
    print(f"\n{path}")
    return document


def verdict(document: dict[str, Any]) -> bool:
    """Whether the medians over rounds hold the targets, at each number running."""
    holds = True
    for count in document["options"]["counts"]:
        runs = [item for item in document["runs"] if item["num_running"] == count]
        gap = statistics.median(item["gap_ratio"] for item in runs)
        speed = statistics.median(item["speed_ratio"] for item in runs)
        is_held = gap <= MOST_GAP and speed >= LEAST_SPEED
        holds = holds and is_held
        print(
            f"{count} running: p99 of gaps {gap:.2f} x undisturbed (at most {MOST_GAP}), prompts at {speed:.2f} x "
            f"their speed alone (at least {LEAST_SPEED}): {'held' if is_held else 'MISSED'}"
        )
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name or the path of a GGUF file")
    parser.add_argument("--objective", choices=("balanced", "throughput", "latency"), default="balanced")
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="answers running")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"of the prompts; default {LENGTHS}")
    parser.add_argument("--rounds", type=int, help="default 3, or 1 with --quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, help="of the native backend; all cores if not given")
    parser.add_argument("--backend", choices=("native", "reference"), default="native")
    parser.add_argument("--kv-cache", default="1200M", help="size of the KV pool")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with the runs missing from this result file")
    parser.add_argument("--quick", action="store_true", help="one round, shorter prompts")
    args = parser.parse_args()
    args.lengths = args.lengths or list(QUICK_LENGTHS if args.quick else LENGTHS)
    args.rounds = args.rounds or (1 if args.quick else 3)
    return 0 if verdict(run(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
