"""Cost of a scheduling step: plan + commit, without a model, in microseconds.

    make evidence-scheduler-cost [ARGS="--steps 2000"]

Targets: at most 3 us per running sequence + 50 us, and 5 ms with 1,000 running and 10,000 waiting; block operations
that do not depend on their number. Every scheduler is made as a server makes it: prefix cache, balanced pacing (which
learns how long steps take), 50 tenants, seven priorities. First the default policy and admission at every size, then
every policy and admission at the largest.

Answers end at a length that the scheduler does not know, at most half their max_tokens, and each that ends is replaced
by a new request; so the figures hold the cost of admission, chunked prefill, hashing, eviction and retirement at their
natural rates. No prompt is ever found in the cache. `ample` memory holds everybody's max_tokens; `tight` memory is what
the asked number of sequences fills on average, with places for twice as many, and long answers come in waves:
`optimistic` preempts again and again, and `predictive` looks ahead. Percentiles are over steps; commit includes making
every event. Processor time of the thread, so that other processes only count through the caches and the core they
share; how much they do is told by `loop ns`, what one pass of a small loop took beside the steps: the same everywhere
on a quiet machine. `least` is the least of the steps' costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from itertools import compress

from harness.results import new_document, result_path, save
from ropeway.core.block_pool import BlockPool
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.plan import StepPlan, StepResult
from ropeway.core.prefix_index import HASH_BYTES, TokenHasher
from ropeway.core.recipe import SchedulerRecipe
from ropeway.core.step_time import StepCosts, StepWork
from ropeway.engine.garbage import settled_garbage

POLICIES = ("vtc", "fcfs", "priority", "spf")
ADMISSIONS = ("predictive", "reserve", "optimistic")
SIZES = ((1, 0), (8, 8), (32, 32), (128, 128), (512, 512), (1000, 10_000))  # running, waiting
BLOCK_SIZE, MAX_PROMPT_TOKENS, MAX_TOKENS = 16, 256, 512
STOP_TOKEN_ID = 0
# Of an accelerator on which a thousand sequences decode: prompts are computed as fast as they come.
COSTS = StepCosts(fixed_s=10e-3, token_s=20e-6, later_token_s=10e-6, pair_s=1e-9, row_s=5e-6)


@dataclass(frozen=True, slots=True)
class Case:
    """A scheduler in a situation."""

    policy: str
    admission: str
    memory: str
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one step, over `num_steps` of them. num_running and num_waiting are on average.

    loop_ns: see above.
    """

    policy: str
    admission: str
    memory: str
    num_running: int
    num_waiting: int
    num_steps: int
    num_preemptions: int
    least_us: float
    mean_us: float
    p50_us: float
    p99_us: float
    target_us: float
    loop_ns: float


class Load:
    """A scheduler that is kept at as many running and waiting sequences as the case says, where memory allows."""

    def __init__(self, case: Case) -> None:
        num_running = case.num_running
        if case.memory == "tight":
            mean_tokens = sum(num_prompt_tokens(i) + num_answer_tokens(i, 500) // 2 for i in range(1000)) // 1000
            num_blocks = num_running * (mean_tokens // BLOCK_SIZE + 1)
        else:
            num_blocks = (num_running + 1) * ((MAX_PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE + 1)
        recipe = SchedulerRecipe(
            max_num_seqs=num_running * (2 if case.memory == "tight" else 1),
            max_num_batched_tokens=max(2048, 4 * num_running),
            max_model_len=MAX_PROMPT_TOKENS + MAX_TOKENS,
            num_kv_blocks=max(num_blocks, (MAX_PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            has_prefix_cache=True,
            scheduling_policy=case.policy,
            admission=case.admission,
        )
        self.scheduler = recipe.with_step_costs(COSTS).make()
        self._now_s = 0.0
        self._num_added = 0
        self._wave = num_running if case.memory == "tight" else None
        self._num_left: dict[int, int] = {}  # tokens until its stop token, of every unfinished sequence
        for _ in range(num_running + case.num_waiting):
            self._add()

    def _add(self) -> None:
        number = self._num_added
        self._num_added += 1
        prompt = tuple(range(number, number + num_prompt_tokens(number)))  # nothing of it is cached
        params = SamplingParams(max_tokens=MAX_TOKENS)
        terms = ServiceTerms(tenant=f"tenant {number % 50}", priority=number % 7)
        request = Request(str(number), prompt, params, MAX_TOKENS, 0, frozenset({STOP_TOKEN_ID}), terms=terms)
        (sequence,) = self.scheduler.add(request, self._now_s)
        self._num_left[sequence.sequence_id] = num_answer_tokens(number, self._wave)

    def step(self) -> float:
        """Run one step; the seconds of processor time that plan and commit took."""
        start_s = time.thread_time()
        plan = self.scheduler.plan(self._now_s)
        planned_s = time.thread_time()
        assert plan is not None
        result = self._compute(plan)
        self._now_s += COSTS.seconds(work_of(plan)) * (0.95 + self._num_added % 11 / 100)
        computed_s = time.thread_time()
        events = self.scheduler.commit(plan, result, self._now_s)
        committed_s = time.thread_time()
        for event in events:
            if event.finish_reason:
                self._add()
        return (planned_s - start_s) + (committed_s - computed_s)

    def _compute(self, plan: StepPlan) -> StepResult:
        sampled_ids = tuple(compress(plan.sequence_ids, plan.is_sampled))
        num_left, token_ids = self._num_left, []
        for sequence_id in sampled_ids:
            num_left[sequence_id] -= 1
            token_ids.append(2 + sequence_id % 1000 if num_left[sequence_id] else STOP_TOKEN_ID)
        return StepResult(plan.step_id, sampled_ids, tuple(token_ids))


def num_prompt_tokens(number: int) -> int:
    return MAX_PROMPT_TOKENS - number * 13 % (MAX_PROMPT_TOKENS // 2)


def num_answer_tokens(number: int, wave: int | None) -> int:
    """They differ, so ends are spread; in waves, `wave` short ones are followed by as many long ones."""
    if wave is None:
        return MAX_TOKENS // 8 + number * 37 % (MAX_TOKENS * 3 // 8)
    return (MAX_TOKENS * 3 // 8 if number // wave % 2 else MAX_TOKENS // 16) + number * 37 % (MAX_TOKENS // 8)


def work_of(plan: StepPlan) -> StepWork:
    pairs = sum([n * start + n * (n + 1) // 2 for start, n in zip(plan.starts, plan.num_tokens, strict=True)])
    return StepWork(plan.total_num_tokens, pairs, sum(plan.is_sampled))


def measure(case: Case, num_steps: int) -> Cost:
    """Warm up until every place is taken and the first have ended, then measure."""
    load = Load(case)
    for _ in range(MAX_TOKENS):
        load.step()
    before, num_running = load.scheduler.stats(), 0
    costs_us, loops_ns, num_waiting = [], [], 0
    for _ in range(num_steps):
        costs_us.append(1e6 * load.step())
        loops_ns.append(loop_ns())
        stats = load.scheduler.stats()
        num_running += stats.num_running
        num_waiting += stats.num_waiting + stats.num_preempted
    num_running, num_waiting = round(num_running / num_steps), round(num_waiting / num_steps)
    costs_us.sort()
    return Cost(
        policy=case.policy,
        admission=case.admission,
        memory=case.memory,
        num_running=num_running,
        num_waiting=num_waiting,
        num_steps=num_steps,
        num_preemptions=stats.num_preemptions - before.num_preemptions,
        least_us=round(costs_us[0], 1),
        mean_us=round(statistics.fmean(costs_us), 1),
        p50_us=round(costs_us[len(costs_us) // 2], 1),
        p99_us=round(costs_us[len(costs_us) * 99 // 100], 1),
        target_us=50 + 3 * num_running,
        loop_ns=round(statistics.fmean(loops_ns), 1),
    )


def loop_ns() -> float:
    """Nanoseconds of processor time of one pass of a loop that adds."""
    total, start_s = 0, time.thread_time()
    for i in range(500):
        total += i & 7
    return 1e9 * (time.thread_time() - start_s) / 500


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


def full_pool(num_blocks: int) -> BlockPool:
    """A pool of which every block is cached, and nobody holds one."""
    pool = BlockPool(num_blocks)
    block_ids = pool.take(num_blocks)
    for block_id in block_ids:
        pool.publish(block_id, blake2b(b"%d" % block_id, digest_size=HASH_BYTES).digest())
    pool.give_back(block_ids)
    assert pool.index.num_parked == num_blocks
    return pool


def traced_bytes(num_blocks: int) -> int:
    """What such a pool and its index allocate."""
    tracemalloc.start()
    before_bytes = tracemalloc.get_traced_memory()[0]
    pool = full_pool(num_blocks)
    num_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    tracemalloc.stop()
    assert pool.num_free_blocks == num_blocks
    return num_bytes


def measure_index(num_blocks: int) -> IndexCost:
    """Fill an index with `num_blocks` different blocks; then use it as sequences of 64 blocks do."""
    hasher = TokenHasher(BLOCK_SIZE)
    prompt = tuple(range(64 * BLOCK_SIZE))
    pool = full_pool(num_blocks)
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
    return IndexCost(num_blocks, 0.0, hash_ns, publish_ns, find_ns, evict_ns, release_ns)


def show_index() -> list[dict[str, object]]:
    """Measure the prefix index at two sizes; its rows for the JSON."""
    print("\n    blocks  bytes each  hash ns  publish ns  find ns  evict ns  release ns   (target 300 bytes, any size)")
    rows = []
    # Times first: beside memory that had been traced, hashing a block was seen to take 6 to 19 us instead of 2.
    for timed in [measure_index(num_blocks) for num_blocks in (1_000, 1_000_000)]:
        cost = replace(timed, bytes_per_block=round(traced_bytes(timed.num_blocks) / timed.num_blocks, 1))
        rows.append(asdict(cost))
        print(
            f"{cost.num_blocks:>10} {cost.bytes_per_block:>11} {cost.hash_ns:>8} {cost.publish_ns:>11} "
            f"{cost.find_ns:>8} {cost.evict_ns:>9} {cost.release_ns:>11}",
            flush=True,
        )
    return rows


def cases() -> list[Case]:
    """The server's defaults at every size, then every policy and admission at the largest."""
    default = [("vtc", "predictive", size) for size in SIZES]
    others = [(policy, admission, SIZES[-1]) for policy in POLICIES for admission in ADMISSIONS]
    chosen = list(dict.fromkeys(default + others))
    return [Case(*names, memory, *size) for *names, size in chosen for memory in ("ample", "tight")]


def show_steps(num_steps: int) -> list[dict[str, object]]:
    """Measure the steps of every case; rows for the JSON."""
    print(
        "  policy   admission memory  running  waiting  preempt.  least us   mean us    p50 us    p99 us   target "
        " loop ns"
    )
    rows = []
    for case in cases():
        cost = measure(case, max(200, num_steps // max(1, case.num_running // 32)))
        rows.append(asdict(cost))
        print(
            f"{cost.policy:>8} {cost.admission:>11} {cost.memory:>6} {cost.num_running:>8} {cost.num_waiting:>8} "
            f"{cost.num_preemptions:>9} {cost.least_us:>9} {cost.mean_us:>9} {cost.p50_us:>9} {cost.p99_us:>9} "
            f"{cost.target_us:>8.0f} {cost.loop_ns:>8}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps measured per line (default 2000)")
    parser.add_argument("--no-index", action="store_true", help="leave out the million-block index")
    args = parser.parse_args()
    document = new_document("scheduler-cost", {"num_steps": args.steps})
    with settled_garbage():  # as `ropeway serve` does
        document["steps"] = show_steps(args.steps)
    document["prefix_index"] = [] if args.no_index else show_index()
    path = result_path(document)
    save(path, document)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
