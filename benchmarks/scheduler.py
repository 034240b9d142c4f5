"""Cost of a scheduling step: plan + commit, without a model, in microseconds.

    make evidence-scheduler-cost [ARGS="--steps 2000"]

Targets: at most 3 us per running sequence + 50 us, and 5 ms with 1,000 running and 10,000 waiting, under every policy
(`vtc` with 50 tenants, `priority` with seven priorities); block operations that do not depend on their number. Each
sequence that ends is replaced by a new request, so the figures hold the cost of admission, chunked prefill and
retirement at their natural rates. `ample` has every block it can fill, and no prefix cache; `cached` has one, in which
no prompt is ever found, so it only costs: hashing, entering, evicting; `tight` has half of those blocks, so it also
preempts. Percentiles are over steps; commit includes making every event. Processor time of the thread, so that other
processes only count through the caches they share.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import compress

from harness.results import new_document, result_path, save
from ropeway.core.admission import OptimisticAdmission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.block_pool import BlockPool
from ropeway.core.fair_service import VirtualTokenCounters
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.plan import StepResult
from ropeway.core.policy import FirstComeFirstServed, Policy, PriorityOrder, ShortestPrefillFirst
from ropeway.core.prefix_index import HASH_BYTES, BlockHasher
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.core.waiting_line import WaitingLine

POLICIES: dict[str, Callable[[], Policy]] = {
    "vtc": VirtualTokenCounters,
    "fcfs": FirstComeFirstServed,
    "priority": lambda: PriorityOrder(60.0),
    "spf": ShortestPrefillFirst,
}
SIZES = ((1, 0), (8, 8), (32, 32), (128, 128), (512, 512), (1000, 10_000))  # running, waiting
BLOCK_SIZE, PROMPT_TOKENS, MAX_TOKENS = 16, 256, 256


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one step, over `num_steps` of them."""

    policy: str
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

    def __init__(
        self, policy: str, num_running: int, num_waiting: int, *, is_tight: bool, has_prefix_cache: bool
    ) -> None:
        blocks_each = (PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE
        num_blocks = max(blocks_each, num_running * blocks_each // (2 if is_tight else 1))
        limits = SchedulerLimits(num_running, max(512, 2 * num_running), PROMPT_TOKENS + MAX_TOKENS)
        admission = OptimisticAdmission(num_blocks // 100)
        kv = KVManager([num_blocks], BLOCK_SIZE, BlockHasher(BLOCK_SIZE) if has_prefix_cache else None)
        line = WaitingLine(POLICIES[policy])
        self.scheduler = Scheduler(limits, kv, line=line, batching=ContinuousBatching(admission))
        self._now_s = 0.0
        self._num_added = 0
        for _ in range(num_running + num_waiting):
            self._add()

    def _add(self) -> None:
        number = self._num_added
        self._num_added += 1
        max_tokens = MAX_TOKENS // 4 + number * 37 % (MAX_TOKENS * 3 // 4)  # lengths differ, so ends are spread
        prompt = tuple(range(number, number + PROMPT_TOKENS - number * 13 % 128))  # nothing of it is cached
        params = SamplingParams(max_tokens=max_tokens)
        terms = ServiceTerms(tenant=f"tenant {number % 50}", priority=number % 7)
        request = Request(str(number), prompt, params, max_tokens, 0, frozenset({0, 1}), terms=terms)
        self.scheduler.add(request, self._now_s)

    def step(self) -> float:
        """Run one step; the seconds of processor time that plan and commit took."""
        self._now_s += 0.05
        start_s = time.thread_time()
        plan = self.scheduler.plan(self._now_s)
        planned_s = time.thread_time()
        assert plan is not None
        sampled_ids = tuple(compress(plan.sequence_ids, plan.is_sampled))
        result = StepResult(plan.step_id, sampled_ids, tuple([2 + i % 1000 for i in sampled_ids]))
        computed_s = time.thread_time()
        events = self.scheduler.commit(plan, result, self._now_s)
        committed_s = time.thread_time()
        for event in events:
            if event.finish_reason:
                self._add()
        return (planned_s - start_s) + (committed_s - computed_s)


def measure(
    policy: str, num_running: int, num_waiting: int, num_steps: int, *, is_tight: bool, has_prefix_cache: bool
) -> Cost:
    """Warm up until every place is taken and the first have ended, then measure."""
    load = Load(policy, num_running, num_waiting, is_tight=is_tight, has_prefix_cache=has_prefix_cache)
    for _ in range(2 * MAX_TOKENS):
        load.step()
    num_preemptions = load.scheduler.stats().num_preemptions
    costs_us = sorted(1e6 * load.step() for _ in range(num_steps))
    stats = load.scheduler.stats()
    return Cost(
        policy=policy,
        memory="tight" if is_tight else "cached" if has_prefix_cache else "ample",
        num_running=stats.num_running,
        num_waiting=stats.num_waiting + stats.num_preempted,
        num_steps=num_steps,
        num_preemptions=stats.num_preemptions - num_preemptions,
        mean_us=round(statistics.fmean(costs_us), 1),
        p50_us=round(costs_us[len(costs_us) // 2], 1),
        p99_us=round(costs_us[len(costs_us) * 99 // 100], 1),
        target_us=min(5000, 50 + 3 * stats.num_running),
    )


@dataclass(frozen=True, slots=True)
class IndexCost:
    """A pool whose every block is cached. bytes_per_block: of all that pool and index allocate, hashes included.

    Nanoseconds per block: hash_ns to hash its tokens; publish_ns to enter it in the index; find_ns to look it up, in a
    prefix of 64; evict_ns to take it for other tokens; release_ns to give it back.
    """

    num_blocks: int
    bytes_per_block: float
    hash_ns: float
    publish_ns: float
    find_ns: float
    evict_ns: float
    release_ns: float


def measure_index(num_blocks: int) -> IndexCost:
    """Fill an index with `num_blocks` different blocks; then use it as sequences of 64 blocks do."""
    hasher = BlockHasher(BLOCK_SIZE)
    prompt = tuple(range(64 * BLOCK_SIZE))
    tracemalloc.start()
    before_bytes = tracemalloc.get_traced_memory()[0]
    pool = BlockPool(num_blocks)
    block_ids = pool.take(num_blocks)
    for block_id in block_ids:
        pool.publish(block_id, blake2b(b"%d" % block_id, digest_size=HASH_BYTES).digest())
    pool.give_back(block_ids)
    del block_ids, block_id
    num_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    tracemalloc.stop()
    assert pool.index.num_parked == num_blocks
    spent_s = [0.0] * 5
    num_rounds = 200
    for number in range(num_rounds):
        request = Request(str(number), prompt, SamplingParams(), 1, 0, terms=ServiceTerms(cache_salt=str(number)))
        times_s = [time.thread_time()]
        hashes = hasher.prompt_hashes(request)
        times_s.append(time.thread_time())
        table = pool.take(len(hashes))
        times_s.append(time.thread_time())
        for block_id, block_hash in zip(table, hashes, strict=True):
            pool.publish(block_id, block_hash)
        times_s.append(time.thread_time())
        assert len(pool.index.find(hashes)) == len(hashes)
        times_s.append(time.thread_time())
        pool.give_back(table)
        times_s.append(time.thread_time())
        for i in range(5):
            spent_s[i] += times_s[i + 1] - times_s[i]
    hash_ns, evict_ns, publish_ns, find_ns, release_ns = [round(1e9 * s / num_rounds / 64) for s in spent_s]
    return IndexCost(num_blocks, round(num_bytes / num_blocks, 1), hash_ns, publish_ns, find_ns, evict_ns, release_ns)


def show_index() -> list[dict[str, object]]:
    """Measure the prefix index at two sizes; its rows for the JSON."""
    print("\n    blocks  bytes each  hash ns  publish ns  find ns  evict ns  release ns   (target 300 bytes, any size)")
    rows = []
    for num_blocks in (1_000, 1_000_000):
        cost = measure_index(num_blocks)
        rows.append(asdict(cost))
        print(
            f"{cost.num_blocks:>10} {cost.bytes_per_block:>11} {cost.hash_ns:>8} {cost.publish_ns:>11} "
            f"{cost.find_ns:>8} {cost.evict_ns:>9} {cost.release_ns:>11}",
            flush=True,
        )
    return rows


def show_steps(num_steps: int) -> list[dict[str, object]]:
    """Measure steps: every size under the default policy, the largest under the others; rows for the JSON."""
    print("  policy memory  running  waiting  preempt.   mean us    p50 us    p99 us   target")
    rows = []
    for policy in POLICIES:
        for num_running, num_waiting in SIZES if policy == "vtc" else SIZES[-1:]:
            for is_tight, has_cache in ((False, False), (False, True), (True, True)):
                steps = max(200, num_steps // max(1, num_running // 32))
                cost = measure(policy, num_running, num_waiting, steps, is_tight=is_tight, has_prefix_cache=has_cache)
                rows.append(asdict(cost))
                print(
                    f"{policy:>8} {cost.memory:>6} {cost.num_running:>8} {cost.num_waiting:>8} "
                    f"{cost.num_preemptions:>9} {cost.mean_us:>9} {cost.p50_us:>9} {cost.p99_us:>9} "
                    f"{cost.target_us:>8.0f}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps measured per line (default 2000)")
    parser.add_argument("--no-index", action="store_true", help="leave out the million-block index")
    args = parser.parse_args()
    document = new_document("scheduler-cost", {"num_steps": args.steps})
    document["steps"] = show_steps(args.steps)
    document["prefix_index"] = [] if args.no_index else show_index()
    path = result_path(document)
    save(path, document)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
