"""Cost of a scheduling step: plan + commit, without a model, in microseconds.

    python benchmarks/scheduler.py [--steps 2000] [--json FILE]

Target: at most 3 us per running sequence + 50 us. Each sequence that ends is replaced by a new request, so the figures
hold the cost of admission, chunked prefill and retirement at their natural rates; `tight` has half of the blocks that
everybody would fill, so it preempts. Percentiles are over steps; commit includes making every event.
Processor time of the thread, so that other processes only count through the caches they share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path

from ropeway.core.admission import OptimisticAdmission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, SamplingParams
from ropeway.core.plan import StepResult
from ropeway.core.scheduler import Scheduler, SchedulerLimits

BLOCK_SIZE, PROMPT_TOKENS, MAX_TOKENS = 16, 256, 256


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one step, over `num_steps` of them."""

    memory: str
    num_running: int
    num_waiting: int
    num_steps: int
    num_preemptions: int
    mean_us: float
    p50_us: float
    p99_us: float
    target_us: float


class Load:
    """A scheduler that is kept at `num_running` running and `num_waiting` waiting sequences."""

    def __init__(self, num_running: int, num_waiting: int, *, is_tight: bool) -> None:
        blocks_each = (PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE
        num_blocks = max(blocks_each, num_running * blocks_each // (2 if is_tight else 1))
        limits = SchedulerLimits(num_running, max(512, 2 * num_running), PROMPT_TOKENS + MAX_TOKENS)
        admission = OptimisticAdmission(num_blocks // 100)
        self.scheduler = Scheduler(limits, KVManager([num_blocks], BLOCK_SIZE), batching=ContinuousBatching(admission))
        self._num_added = 0
        for _ in range(num_running + num_waiting):
            self._add()

    def _add(self) -> None:
        number = self._num_added
        self._num_added += 1
        max_tokens = MAX_TOKENS // 4 + number * 37 % (MAX_TOKENS * 3 // 4)  # lengths differ, so ends are spread
        prompt = tuple(range(PROMPT_TOKENS - number * 13 % 128))
        params = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(Request(str(number), prompt, params, max_tokens, 0, frozenset({0, 1})), 0.0)

    def step(self) -> float:
        """Run one step; the seconds of processor time that plan and commit took."""
        start_s = time.thread_time()
        plan = self.scheduler.plan(0.0)
        planned_s = time.thread_time()
        assert plan is not None
        sampled_ids = tuple(compress(plan.sequence_ids, plan.is_sampled))
        result = StepResult(plan.step_id, sampled_ids, tuple([2 + i % 1000 for i in sampled_ids]))
        computed_s = time.thread_time()
        events = self.scheduler.commit(plan, result, 0.0)
        committed_s = time.thread_time()
        for event in events:
            if event.finish_reason:
                self._add()
        return (planned_s - start_s) + (committed_s - computed_s)


def measure(num_running: int, num_waiting: int, num_steps: int, *, is_tight: bool) -> Cost:
    """Warm up until every place is taken and the first have ended, then measure."""
    load = Load(num_running, num_waiting, is_tight=is_tight)
    for _ in range(2 * MAX_TOKENS):
        load.step()
    num_preemptions = load.scheduler.stats().num_preemptions
    costs_us = sorted(1e6 * load.step() for _ in range(num_steps))
    stats = load.scheduler.stats()
    return Cost(
        memory="tight" if is_tight else "ample",
        num_running=stats.num_running,
        num_waiting=stats.num_waiting + stats.num_preempted,
        num_steps=num_steps,
        num_preemptions=stats.num_preemptions - num_preemptions,
        mean_us=round(statistics.fmean(costs_us), 1),
        p50_us=round(costs_us[len(costs_us) // 2], 1),
        p99_us=round(costs_us[len(costs_us) * 99 // 100], 1),
        target_us=50 + 3 * stats.num_running,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps measured per line (default 2000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    print(" memory  running  waiting  preempt.   mean us    p50 us    p99 us   target")
    costs = []
    for num_running, num_waiting in ((1, 0), (8, 8), (32, 32), (128, 128), (512, 512), (1000, 10_000)):
        for is_tight in (False, True):
            cost = measure(
                num_running, num_waiting, max(200, args.steps // max(1, num_running // 32)), is_tight=is_tight
            )
            costs.append(asdict(cost))
            print(
                f"{cost.memory:>7} {cost.num_running:>8} {cost.num_waiting:>8} {cost.num_preemptions:>9} "
                f"{cost.mean_us:>9} {cost.p50_us:>9} {cost.p99_us:>9} {cost.target_us:>8.0f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"costs": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
