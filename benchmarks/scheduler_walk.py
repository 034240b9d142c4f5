"""Random calls to random schedulers, with every invariant checked after each: a plain seeded driver.

    make evidence-scheduler-walk [ARGS="--steps 5000000 --seed 0 --processes 2 --resume FILE"]

A leg of LEG_STEPS steps has its own seed, so a leg that fails can be run alone (--leg N). In it a scheduler of random
size, policy, admission and batching is driven for EPISODE_STEPS steps by arrivals, aborts, stops, failed rows and
failed steps, and then until it is empty: everybody must end, in bounded time, and all memory be free.
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import compress
from pathlib import Path
from typing import Any

from harness.results import open_document, save
from ropeway.core.batching import Batching, ContinuousBatching, StaticBatching
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.plan import StepPlan, StepResult
from ropeway.core.prefix_index import TokenHasher
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.core.waiting_line import WaitingLine
from support.schedulers import ADMISSIONS, POLICIES

LEG_STEPS = 50_000
EPISODE_STEPS = 500
STOP_TOKEN_ID = 0
MOST_OPEN = 12


class Episode:
    """One scheduler and what was asked of it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now_s = 0.0
        self._num_requests = 0
        self._open: dict[str, set[int]] = {}  # request id -> indices of unfinished sequences
        self.num_steps = 0
        self.policy = rng.choice(list(POLICIES))
        self.admission = rng.choice(list(ADMISSIONS))
        block_size = rng.randint(1, 4)
        self._num_slots = block_size * (num_blocks := rng.randint(2, 14))
        batching: Batching = ContinuousBatching(ADMISSIONS[self.admission]())
        if rng.random() < 0.1:
            batching = StaticBatching(is_padded=rng.random() < 0.5)
        hasher = TokenHasher(block_size) if rng.random() < 0.5 else None
        self._scheduler = Scheduler(
            SchedulerLimits(rng.randint(1, 6), rng.randint(1, 12), self._num_slots),
            KVManager([num_blocks] * rng.randint(1, 2), block_size, hasher),
            line=WaitingLine(POLICIES[self.policy], background_share=rng.choice((0.0, 0.1, 0.5))),
            batching=batching,
        )
        self._has_terms = rng.random() < 0.7

    def run(self, num_steps: int) -> None:
        """Random calls for so many steps, then to the end."""
        while self.num_steps < num_steps:
            self._ask()
            self._step(may_fail=True)
        bound = self.num_steps + 50 + sum(map(len, self._open.values())) * 20 * self._num_slots
        while self._scheduler.has_work:
            self._step(may_fail=False)
            assert self.num_steps < bound, "somebody starves"
        assert not self._open, "a sequence never ended"
        stats = self._scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks, "a leak"

    def _ask(self) -> None:
        rng = self._rng
        self._now_s += rng.random() * 0.2
        while len(self._open) < MOST_OPEN and rng.random() < 0.35:
            self._add()
        if self._open and rng.random() < 0.03:
            self._end(rng.choice(list(self._open)))

    def _add(self) -> None:
        rng = self._rng
        num_prompt_tokens = rng.randint(1, max(1, self._num_slots // 2))
        max_tokens = rng.randint(1, self._num_slots - num_prompt_tokens)
        name, n = str(self._num_requests), rng.choice((1, 1, 1, 2, 3))
        self._num_requests += 1
        terms = ServiceTerms()
        if self._has_terms:
            terms = ServiceTerms(
                tenant=rng.choice("abc"),
                user=rng.choice((None, "x", "y")),
                priority=rng.randint(-2, 2),
                is_background=rng.random() < 0.3,
            )
        prompt = tuple([1 + rng.randint(0, 1) for _ in range(num_prompt_tokens)])
        params = SamplingParams(n=n, max_tokens=max_tokens)
        request = Request(name, prompt, params, max_tokens, 0, frozenset({STOP_TOKEN_ID}), terms=terms)
        self._scheduler.add(request, self._now_s)
        self._open[name] = set(range(n))

    def _end(self, name: str) -> None:
        if self._rng.random() < 0.5:
            self._take(self._scheduler.abort(name))
        else:
            self._take(self._scheduler.stop(name, self._rng.choice(list(self._open[name]))))
        self._scheduler.check_invariants()

    def _step(self, *, may_fail: bool) -> None:
        rng, scheduler = self._rng, self._scheduler
        self.num_steps += 1
        plan = scheduler.plan(self._now_s)
        assert (plan is not None) == bool(self._open), "work, and none of it done"
        if plan is None:
            return
        scheduler.check_invariants()
        if may_fail and rng.random() < 0.05 and self._open:
            self._end(rng.choice(list(self._open)))
        self._now_s += 0.01
        if may_fail and rng.random() < 0.002:
            self._take(scheduler.fail(plan, self._now_s))
        else:
            self._take(scheduler.commit(plan, self._result(plan, may_fail), self._now_s))
        scheduler.check_invariants()

    def _result(self, plan: StepPlan, may_fail: bool) -> StepResult:
        rng = self._rng
        ids = tuple(compress(plan.sequence_ids, plan.is_sampled))
        failed_ids = (rng.choice(ids),) if ids and may_fail and rng.random() < 0.005 else ()
        ids = tuple([i for i in ids if i not in failed_ids])
        token_ids = tuple([STOP_TOKEN_ID if rng.random() < 0.05 else rng.randint(1, 2) for _ in ids])
        return StepResult(plan.step_id, ids, token_ids, failed_ids)

    def _take(self, events: list[Any]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self._open[event.request_id].remove(event.index)  # KeyError: a second terminal event
                if not self._open[event.request_id]:
                    del self._open[event.request_id]


def run_leg(seed: int, leg: int) -> dict[str, Any]:
    """One leg; what it did. Raises AssertionError with the leg's and episode's number."""
    start_s = time.monotonic()
    rng = random.Random(f"{seed}/{leg}")
    num_steps = num_preemptions = num_episodes = num_requests = 0
    while num_steps < LEG_STEPS:
        episode = Episode(rng)
        try:
            episode.run(EPISODE_STEPS)
        except Exception as error:
            error.add_note(f"leg {leg} of seed {seed}, episode {num_episodes}: {episode.policy}, {episode.admission}")
            raise
        num_steps += episode.num_steps
        num_episodes += 1
        num_requests += episode._num_requests
        num_preemptions += episode._scheduler.stats().num_preemptions
    return {
        "leg": leg,
        "num_steps": num_steps,
        "num_episodes": num_episodes,
        "num_requests": num_requests,
        "num_preemptions": num_preemptions,
        "wall_s": round(time.monotonic() - start_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--leg", type=int, help="run this leg alone, and record nothing")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with this result file")
    args = parser.parse_args()
    if args.leg is not None:
        print(run_leg(args.seed, args.leg))
        return
    options = {"num_steps": args.steps, "seed": args.seed, "leg_steps": LEG_STEPS, "episode_steps": EPISODE_STEPS}
    document, path = open_document(args.resume, "scheduler-walk", options, "legs")
    options = document["options"]
    legs = document["legs"]
    done = {each["leg"] for each in legs}
    numbers = [n for n in range(-(-options["num_steps"] // LEG_STEPS)) if n not in done]
    start_s = time.monotonic()
    with ProcessPoolExecutor(args.processes) as pool:
        for leg in pool.map(run_leg, [options["seed"]] * len(numbers), numbers):
            legs.append(leg)
            document["num_steps"] = sum(each["num_steps"] for each in legs)
            save(path, document)
            taken_s = time.monotonic() - start_s
            print(f"{document['num_steps']:>10,} steps, {leg['num_preemptions']:,} preemptions in leg {leg['leg']}, "
                  f"{taken_s:,.0f} s", flush=True)  # fmt: skip
    print(f"no invariant was violated; written to {path}")


if __name__ == "__main__":
    main()
