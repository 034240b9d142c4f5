"""Running answers while long prompts stream in: gaps between tokens, and the speed that prompts keep.

    make evidence-interference                             1, 8 and 32 running, three rounds, a quarter of an hour
    make evidence-interference ARGS="--resume FILE --most-runs 3"      three of the runs missing from FILE
    python benchmarks/interference.py --quick              one round, shorter prompts, a few minutes

In process, on one set of weights. In each round and for each number of running answers: the prompts are timed alone;
then the gaps of the answers while nothing else is there, then while the prompts stream in (two at a time, each of one
token of answer), then undisturbed again; then the prompts alone again. Answers grow meanwhile, and the longer they are
the longer an undisturbed step takes; and a shared machine's speed moves by half within a stream of half a minute. So
each gap is measured by the undisturbed median of its place, on the line through those before and after the stream and
those of every LOOKS_PER_PLACE steps within it that held no prompt: the scheduler takes one in some forty, to look at.
The line through the ends alone is stated too. Greedy, random tokens, of which no prefix is found again.

Targets, at each number running: the p99 of all gaps of all rounds within 2.5 x their undisturbed median; and the
prompts at 0.4 x the tokens per second they have alone (median of rounds).
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections import Counter
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
LENGTHS, QUICK_LENGTHS = (500, 2000, 8000), (300, 1500)
MOST_GAP, LEAST_SPEED = 2.5, 0.4
RATIO_STEP = 0.02
MIN_NUM_GAPS = 300  # at each number running, for a p99 to mean something
RUNNING_PROMPT_TOKENS = 64
NUM_UNDISTURBED_STEPS = 100
NUM_IN_FLIGHT = 2
LOOKS_PER_PLACE = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round at one number of running answers. Seconds, prompt tokens per second, and gaps in order.

    places: (gap, undisturbed median there), from before the stream to after it. calm_p99_ratio: of the undisturbed gaps
    before and after, over these. gap_counts: how many of the disturbed gaps, over the undisturbed median of their
    place, are above i and at most i + 1 times RATIO_STEP; end_gap_counts: the same by the ends alone.
    alone_tokens_per_s: just before and just after.
    """

    round: int
    num_running: int
    places: list[tuple[float, float]]
    calm_p99_ratio: float
    gap_counts: list[int]
    end_gap_counts: list[int]
    prompt_tokens_per_s: float
    alone_tokens_per_s: tuple[float, float]
    predicted_over_achieved: float

    @property
    def speed_ratio(self) -> float:
        return self.prompt_tokens_per_s / statistics.harmonic_mean(self.alone_tokens_per_s)


class WatchedBackend:
    """A backend of which is known how many tokens its last pass held, and whether some of them a part of the layers."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.num_tokens = 0
        self.is_sliced = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, batch: Any) -> Any:
        self.num_tokens, self.is_sliced = len(batch.token_ids), batch.layer_slice is not None
        return self._backend.forward(batch)


class Bench:
    """A loaded model, and engines on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        config = EngineConfig(
            num_threads=args.num_threads,
            backend=args.backend,
            isa=args.isa,
            objective=args.objective,
            kv_cache_memory=args.kv_cache,
        )
        prepared = prepare_model(args.model, config)
        self._backend, self.facts = WatchedBackend(prepared.backend), prepared.facts
        self._num_groups = len(prepared.model.program.cache_groups)
        self._vocab_size = prepared.model.program.vocab_size
        self.costs = calibrate_step_costs(prepared.backend, prepared.model.program, self.facts)
        self.lengths = [min(length, self.facts.max_model_len - 2) for length in args.lengths]
        self._number = 0
        self._alone: tuple[int, float] | None = None  # seed and speed of the last prompts that were

    def engine(self) -> Engine:
        recipe = scheduler_recipe(
            self.facts,
            num_cache_groups=self._num_groups,
            costs=self.costs,
            num_layers=self._backend.num_layers,
        )
        return make_engine(self._backend, recipe)

    def request(self, rng: random.Random, num_prompt_tokens: int, max_tokens: int) -> Request:
        self._number += 1
        prompt = tuple(rng.randrange(100, self._vocab_size) for _ in range(num_prompt_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return Request(str(self._number), prompt, params, max_tokens, seed=0)

    def stream(self, engine: Engine, rng: random.Random) -> tuple[float, list[float], list[int]]:
        """Prompts stream in until all are answered: seconds from the first to the last, each step's gap, and which of
        the steps held no prompt.
        """
        coming = [self.request(rng, length, 1) for length in self.lengths]
        open_ids: set[str] = set()
        gaps: list[float] = []
        looks: list[int] = []
        num_running = engine.stats().num_running
        start_s = last_s = time.perf_counter()
        while coming or open_ids:
            while coming and len(open_ids) < NUM_IN_FLIGHT:
                open_ids.add(coming[0].request_id)
                engine.submit(coming.pop(0))
            events = engine.step()
            now_s = time.perf_counter()
            if self._backend.num_tokens == num_running and not self._backend.is_sliced:
                looks.append(len(gaps))
            gaps.append(now_s - last_s)
            last_s = now_s
            open_ids -= {event.request_id for event in events if event.finish_reason}
        return last_s - start_s, gaps, looks

    def num_answer_tokens(self, num_running: int) -> int:
        """What each running answer may hold beside the prompts, so that all board at once; more than a run takes."""
        num_slots = self.facts.num_kv_blocks * self.facts.block_size - NUM_IN_FLIGHT * self.facts.max_model_len
        return min(self.facts.max_model_len, num_slots // num_running) - 2 * RUNNING_PROMPT_TOKENS

    def alone_tokens_per_s(self, seed: int, *, is_fresh: bool) -> float:
        """Of the prompts with nothing beside them; is_fresh: not those timed last, after what else was measured."""
        if is_fresh or self._alone is None or self._alone[0] != seed:
            self._alone = seed, sum(self.lengths) / self.stream(self.engine(), random.Random(seed + 1))[0]
        return self._alone[1]

    def measure(self, round_number: int, num_running: int, seed: int) -> Outcome:
        rng = random.Random(seed)
        alone_before = self.alone_tokens_per_s(seed, is_fresh=False)
        engine = self.engine()
        for _ in range(num_running):
            engine.submit(self.request(rng, RUNNING_PROMPT_TOKENS, self.num_answer_tokens(num_running)))
        while engine.stats().num_generation_tokens < 2 * num_running or engine.stats().num_waiting:
            engine.step()
        assert engine.stats().num_running == num_running, "an answer ended before the first prompt came"
        before = undisturbed(engine)
        streamed_s, gaps, looks = self.stream(engine, random.Random(seed + 1))
        after = undisturbed(engine)
        assert engine.stats().num_running == num_running, "an answer ended before the last prompt was computed"
        pacing = engine.stats().pacing
        assert pacing is not None
        before_s, after_s = statistics.median(before), statistics.median(after)
        ends = [(0.0, before_s), (float(len(gaps)), after_s)]
        places = [ends[0], *places_of_looks(gaps, looks), ends[1]]
        return Outcome(
            round_number,
            num_running,
            places,
            percentile_99([gap / before_s for gap in before] + [gap / after_s for gap in after]),
            count_ratios(ratios_by(gaps, places)),
            count_ratios(ratios_by(gaps, ends)),
            sum(self.lengths) / streamed_s,
            (alone_before, self.alone_tokens_per_s(seed, is_fresh=True)),
            pacing.predicted_s / pacing.achieved_s,
        )


def places_of_looks(gaps: list[float], looks: list[int]) -> list[tuple[float, float]]:
    """Where every LOOKS_PER_PLACE undisturbed steps of a stream are, and their median; the last may be more."""
    num_places = len(looks) // LOOKS_PER_PLACE
    groups = [looks[i * LOOKS_PER_PLACE : (i + 1) * LOOKS_PER_PLACE] for i in range(num_places)]
    if groups:
        groups[-1] += looks[num_places * LOOKS_PER_PLACE :]
    return [(statistics.mean(group) + 0.5, statistics.median([gaps[i] for i in group])) for group in groups]


def ratios_by(gaps: list[float], places: list[tuple[float, float]]) -> list[float]:
    """Each gap over the undisturbed median of its place, on the line through those given."""
    ratios: list[float] = []
    for (begin, begin_s), (end, end_s) in itertools.pairwise(places):
        for i in range(len(ratios), len(gaps)):
            if i + 0.5 > end:
                break
            ratios.append(gaps[i] / (begin_s + (end_s - begin_s) * (i + 0.5 - begin) / (end - begin)))
    return ratios


def count_ratios(ratios: list[float]) -> list[int]:
    """How many lie in each interval of RATIO_STEP, its upper end included."""
    counts = Counter(-int(-ratio // RATIO_STEP) - 1 for ratio in ratios)
    return [counts[i] for i in range(max(counts) + 1)]


def quantile(counts: list[int], share: float) -> float:
    """The upper end of the interval in which this share of what was counted is reached."""
    needed = share * sum(counts)
    return RATIO_STEP * (1 + next(i for i, total in enumerate(itertools.accumulate(counts)) if total >= needed))


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
        "isa": args.isa,
        "prompt_lengths": bench.lengths,
        "counts": list(args.counts),
        "seed": args.seed,
        "step_costs": asdict(bench.costs),
    }
    document, path = open_document(args.resume, "interference", options, "runs")
    done = {(item["round"], item["num_running"]) for item in document["runs"]}
    missing = [pair for pair in itertools.product(range(args.rounds), args.counts) if pair not in done]
    print(
        "round  running  undisturbed ms    p99  p50 ratio  p99 ratio  by ends   gaps  prompt tok/s       alone  ratio",
        flush=True,
    )
    for number, count in missing[: args.most_runs]:
        outcome = bench.measure(number, count, args.seed + number)
        document["runs"].append(asdict(outcome) | {"speed_ratio": outcome.speed_ratio})
        save(path, document)
        counts = outcome.gap_counts
        print(
            f"{number:>5} {count:>8} {outcome.places[0][1] * 1000:>7.1f} {outcome.places[-1][1] * 1000:>7.1f} "
            f"{outcome.calm_p99_ratio:>6.2f} {quantile(counts, 0.5):>10.2f} {quantile(counts, 0.99):>10.2f} "
            f"{quantile(outcome.end_gap_counts, 0.99):>8.2f} {sum(counts):>6} {outcome.prompt_tokens_per_s:>13.0f} "
            f"{outcome.alone_tokens_per_s[0]:>5.0f} {outcome.alone_tokens_per_s[1]:>5.0f} {outcome.speed_ratio:>6.2f}",
            flush=True,
        )
    print(f"\n{path}")
    return document


def verdict(document: dict[str, Any]) -> bool:
    """Whether there are gaps enough at each number running, and the targets are held."""
    holds = True
    for count in document["options"]["counts"]:
        runs = [item for item in document["runs"] if item["num_running"] == count]
        counts, by_ends = [
            [sum(column) for column in itertools.zip_longest(*[item[name] for item in runs], fillvalue=0)]
            for name in ("gap_counts", "end_gap_counts")
        ]
        if sum(counts) < MIN_NUM_GAPS:
            print(f"{count} running: {sum(counts)} gaps are too few to judge by, of {MIN_NUM_GAPS}")
            holds = False
            continue
        middle, last, by_ends_last = quantile(counts, 0.5), quantile(counts, 0.99), quantile(by_ends, 0.99)
        speed = statistics.median(item["speed_ratio"] for item in runs)
        is_held = last <= MOST_GAP and speed >= LEAST_SPEED
        holds = holds and is_held
        print(
            f"{count} running: {len(runs)} runs, {sum(counts)} gaps, p50 {middle:.2f} and p99 {last:.2f} x undisturbed "
            f"(at most {MOST_GAP}; by the ends alone {by_ends_last:.2f}), prompts at {speed:.2f} x their speed alone "
            f"(at least {LEAST_SPEED}): {'held' if is_held else 'MISSED'}"
        )
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name or the path of a GGUF file")
    parser.add_argument("--objective", choices=("balanced", "throughput", "latency"), default="balanced")
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="answers running")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"of the prompts; default {LENGTHS}")
    parser.add_argument("--rounds", type=int, help="default 3, or 1 with --quick")
    parser.add_argument("--most-runs", type=int, metavar="N", help="stop after N runs; go on with --resume")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, help="of the native backend; all cores if not given")
    parser.add_argument("--backend", choices=("native", "reference"), default="native")
    parser.add_argument("--isa", help="instruction set of the native kernels; the best this processor has if not given")
    parser.add_argument("--kv-cache", default="1200M", help="size of the KV pool")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with the runs missing from this result file")
    parser.add_argument("--quick", action="store_true", help="one round, shorter prompts")
    args = parser.parse_args()
    args.lengths = args.lengths or list(QUICK_LENGTHS if args.quick else LENGTHS)
    args.rounds = args.rounds or (1 if args.quick else 3)
    return 0 if verdict(run(args)) else 1


if __name__ == "__main__":
    sys.exit(main())
