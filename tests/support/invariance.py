"""Requests served under options that must not matter, and each of them alone: the same logits to the bit, the same
tokens and ends.

A `Trial` is one engine, made for it, on a backend of its own. Time is virtual, so a trial repeats.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ropeway.backends.native import NativeBackend
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.plan import SequenceEvent
from ropeway.core.recipe import SchedulerRecipe
from ropeway.core.scheduler import Scheduler
from ropeway.core.sequence import Sequence as EngineSequence
from ropeway.core.sequence import WaitingReason
from ropeway.core.stats import EngineStats
from ropeway.engine.engine import Engine
from ropeway.engine.runner import Runner
from ropeway.model.loading import Model

from .recording_backend import RecordingBackend
from .waves import WavePacing

TICK_S = 0.005  # what each look at the clock takes
MOST_STEPS = 20_000
MOST_FORCED_PREEMPTIONS = 2  # of a sequence
WARM_SEED = 1 << 40  # those that only fill the cache draw with seeds above this


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What must not matter; the defaults are those of a request alone.

    prefix_cache: off; miss: on, and nothing that is asked can be shared; partial, hit: half or all of each prompt was
    computed before. pool: ample, or tight: for the longest sequence and half of it more. preemption: of the scheduler's
    making only, or one sequence after every step. mates: some of the requests are aborted, stopped or timed out.
    n: most sequences of a request. token_budget: of a step. pacing: by tokens only, timed, or in waves.
    """

    policy: str = "fcfs"
    admission: str = "reserve"
    prefix_cache: str = "off"
    pool: str = "ample"
    preemption: str = "natural"
    token_budget: int = 4096
    pacing: str = "fixed"
    n: int = 3
    mates: str = "finish"
    classes: str = "interactive"
    max_num_seqs: int = 1
    block_size: int = 16
    num_threads: int = 1


ALONE = Options()
CHOICES: dict[str, tuple[str | int, ...]] = {
    "policy": ("vtc", "fcfs", "priority", "spf"),
    "admission": ("predictive", "reserve", "optimistic"),
    "prefix_cache": ("off", "miss", "partial", "hit"),
    "pool": ("ample", "tight"),
    "preemption": ("natural", "forced"),
    "token_budget": (7, 40, 4096),
    "pacing": ("fixed", "timed"),
    "n": (1, 3),
    "mates": ("finish", "aborted", "stopped", "timed out"),
    "classes": ("interactive", "mixed"),
    "max_num_seqs": (3, 16),
    "block_size": (8, 16, 32),
    "num_threads": (1, 2),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one sequence. digests: of the logits that each token was drawn from."""

    token_ids: tuple[int, ...]
    digests: tuple[str, ...]
    finish_reason: str


Key = tuple[str, int]  # request id and index
Answers = dict[Key, Answer]
ChooseVictim = Callable[[list[EngineSequence]], EngineSequence | None]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer is not what it is alone. position: of the token in the answer."""

    request_id: str
    index: int
    position: int
    what: str
    got: str
    alone: str


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a trial. ended_ids: requests that were ended before their time."""

    answers: Answers
    ended_ids: frozenset[str]
    stats: EngineStats
    num_blocks_copied: int
    conflicts: tuple[tuple[str, int, int], ...]  # request id, index, position in the sequence


def make_requests(
    vocab_size: int, *, num_requests: int, max_prompt_tokens: int, max_tokens: int, seed: int
) -> list[Request]:
    """Prompts that share beginnings, some the whole of another; greedy and seeded, filtered and penalised, some ended
    by a token, every fourth with n = 3.
    """
    rng = random.Random(seed)

    def random_ids(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(num_tokens))

    trunks = [random_ids(max_prompt_tokens) for _ in range(3)]
    requests: list[Request] = []
    for i in range(num_requests):
        num_shared = rng.choice((0, max_prompt_tokens // 8, max_prompt_tokens // 4, 2 * max_prompt_tokens // 3))
        num_own = rng.randint(1, max(1, max_prompt_tokens // 6))
        prompt = max_prompt_tokens if i == 1 else num_shared + num_own
        token_ids = (trunks[i % 3][:num_shared] + random_ids(max_prompt_tokens))[:prompt]
        params = SamplingParams(temperature=0.0, n=3 if i % 4 == 3 else 1)
        if i % 2:
            params = replace(params, temperature=1.0)
        if i % 6 == 5:
            params = replace(params, top_p=0.9, top_k=50, repetition_penalty=1.1)
        stop_ids = frozenset(range(0, vocab_size, 12)) if i % 5 == 4 else frozenset[int]()
        num_tokens = rng.randint(max(1, max_tokens // 4), max_tokens)
        requests.append(Request(str(i), token_ids, params, num_tokens, 1000 + i, stop_ids))
    return requests


class Trial:
    """One engine under `options`, and the requests that it is asked; `rng` decides what the options leave open."""

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        options: Options = ALONE,
        rng: random.Random | None = None,
        backend_type: type[NativeBackend] = NativeBackend,
    ) -> None:
        self._options, self._rng = options, rng or random.Random(0)
        self._now_s = 0.0
        self._requests = [self._asked(request) for request in requests]
        self._ends = self._draw_ends()
        longest = max(len(r.prompt_token_ids) + r.max_tokens for r in requests)
        self._recipe = self._make_recipe(longest)
        self._backend = RecordingBackend(
            backend_type(
                model.program,
                model.tensors,
                num_kv_blocks=self._recipe.num_kv_blocks,
                block_size=options.block_size,
                num_threads=options.num_threads,
            )
        )
        self._scheduler: Scheduler = self._recipe.make()
        if options.pacing == "waves":
            self._scheduler._pacing = WavePacing(options.token_budget, self._backend.num_layers)
        runner = Runner(self._backend, max_num_seqs=options.max_num_seqs, max_model_len=longest)
        self._engine = Engine(self._scheduler, runner, self._read_clock)
        self._tokens: dict[Key, list[int]] = {}
        self._reasons: dict[Key, str] = {}

    def run(self, choose_victim: ChooseVictim | None = None) -> Served:
        """Serve everything to its end. choose_victim: whom to preempt after a step, of those who run.

        Raises AssertionError for a violated invariant and for a run that does not end.
        """
        choose_victim = choose_victim or self._random_victim
        self._warm()
        arrivals = [(0 if self._rng.random() < 0.5 else self._rng.randrange(1, 10), r) for r in self._requests]
        arrivals.sort(key=lambda arrival: -arrival[0])
        step = 0
        while arrivals or self._engine.has_work:
            while arrivals and (arrivals[-1][0] <= step or not self._engine.has_work):
                self._engine.submit(arrivals.pop()[1])
            self._end_mates(step)
            self._take(self._engine.step())
            self._preempt(choose_victim)
            self._scheduler.check_invariants()
            step += 1
            assert step < MOST_STEPS, "it does not end"
        return self._served()

    # -- what is asked -------------------------------------------------------------------------------------------------

    def _asked(self, request: Request) -> Request:
        options, rng = self._options, self._rng
        if options == ALONE:
            return request
        terms = ServiceTerms(
            tenant=rng.choice("ab"),
            user=rng.choice((None, "x", "y")),
            priority=rng.randint(-2, 2) if options.policy == "priority" else 0,
            is_background=options.classes == "mixed" and rng.random() < 0.4,
            cache_salt=request.request_id if options.prefix_cache == "miss" else "",
        )
        params = replace(request.params, n=min(options.n, request.params.n))
        return replace(request, params=params, terms=terms)

    def _draw_ends(self) -> dict[str, int]:
        """Of a third of the requests, the step after which they are ended; or when their time is up."""
        if self._options.mates == "finish":
            return {}
        ended = self._rng.sample(self._requests, max(1, len(self._requests) // 3))
        ends = {request.request_id: self._rng.randrange(1, 25) for request in ended}
        if self._options.mates == "timed out":
            for i, request in enumerate(self._requests):
                if request.request_id in ends:
                    timeout_s = 2 * TICK_S * ends[request.request_id]
                    self._requests[i] = replace(request, terms=replace(request.terms, timeout_s=timeout_s))
        return ends

    def _make_recipe(self, longest: int) -> SchedulerRecipe:
        options = self._options

        def num_blocks(num_tokens: int) -> int:
            return -(-num_tokens // options.block_size)

        each = [num_blocks(len(r.prompt_token_ids) + r.max_tokens) * r.params.n for r in self._requests]
        costs = {}
        if options.pacing == "timed":
            costs = {"step_fixed_s": 0.004, "step_token_s": 0.0005, "step_later_token_s": 0.0005, "step_row_s": 0.0002}
        return SchedulerRecipe(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.token_budget,
            max_model_len=longest,
            num_kv_blocks=3 * num_blocks(longest) // 2 if options.pool == "tight" else 2 * sum(each),
            block_size=options.block_size,
            has_prefix_cache=options.prefix_cache != "off",
            scheduling_policy=options.policy,
            admission=options.admission,
            objective="latency" if options.pacing == "timed" else "balanced",
            **costs,
        )

    # -- driving -------------------------------------------------------------------------------------------------------

    def _read_clock(self) -> float:
        self._now_s += TICK_S
        return self._now_s

    def _warm(self) -> None:
        """Compute before what is to be found in the cache."""
        if self._options.prefix_cache not in ("partial", "hit"):
            return
        for request in self._requests:
            num_tokens = len(request.prompt_token_ids)
            if self._options.prefix_cache == "partial":
                num_tokens = max(1, num_tokens // 2)
            warm = Request(
                f"warm {request.request_id}",
                request.prompt_token_ids[:num_tokens],
                SamplingParams(temperature=0.0),
                1,
                WARM_SEED + request.seed,
                terms=replace(request.terms, timeout_s=None),
            )
            self._engine.submit(warm)
        while self._engine.has_work:
            self._engine.step()

    def _end_mates(self, step: int) -> None:
        for request in self._requests:
            if self._ends.get(request.request_id) != step:
                continue
            if self._options.mates == "aborted":
                self._take(self._engine.abort(request.request_id))
            elif self._options.mates == "stopped":
                for index in range(request.params.n):
                    self._take(self._engine.stop(request.request_id, index))

    def _preempt(self, choose_victim: ChooseVictim) -> None:
        victim = choose_victim(list(self._scheduler._roster.running.values()))
        if victim is not None:
            self._scheduler._roster.preempt(victim, WaitingReason.POLICY, self._now_s)

    def _random_victim(self, running: list[EngineSequence]) -> EngineSequence | None:
        if self._options.preemption == "natural":
            return None
        victims = [sequence for sequence in running if sequence.num_preemptions < MOST_FORCED_PREEMPTIONS]
        return self._rng.choice(victims) if victims else None

    def _take(self, events: list[SequenceEvent]) -> None:
        for event in events:
            key = event.request_id, event.index
            assert key not in self._reasons, f"{key} got news after its end"
            self._tokens.setdefault(key, []).extend(event.token_ids)
            if event.finish_reason is not None:
                self._reasons[key] = event.finish_reason

    def _served(self) -> Served:
        names = {request.seed: request.request_id for request in self._requests}
        digests: dict[Key, list[str]] = {}
        for seed, index, position in sorted(self._backend.hashes):
            if seed in names:
                digest = self._backend.hashes[seed, index, position].hex()
                digests.setdefault((names[seed], index), []).append(digest)
        answers = {
            key: Answer(tuple(token_ids), tuple(digests.get(key, ())), self._reasons[key])
            for key, token_ids in self._tokens.items()
        }
        conflicts = [(names[seed], index, at) for seed, index, at in self._backend.conflicts if seed in names]
        stats = self._engine.stats()
        assert set(answers) == {(r.request_id, i) for r in self._requests for i in range(r.params.n)}, "some got no end"
        assert stats.num_used_blocks == 0, "a leak"
        return Served(answers, frozenset(self._ends), stats, self._backend.num_blocks_copied, tuple(conflicts))


def answers_alone(model: Model, request: Request) -> Answers:
    """What comes of a request by itself, its sequences one after the other, on a fresh engine and backend."""
    served = Trial(model, [request]).run()
    assert not served.conflicts, "alone, and drawn from two sets of logits"
    return served.answers


def compare(served: Served, alone: Mapping[Key, Answer]) -> tuple[int, Difference | None]:
    """How many rows of logits were compared, and the first difference: by request, then by position."""
    num_compared, differences = 0, []
    for (request_id, index), answer in sorted(served.answers.items(), key=lambda item: (int(item[0][0]), item[0][1])):
        reference = alone[request_id, index]
        num_compared += len(answer.digests)
        found = _first_difference(answer, reference, is_ended=request_id in served.ended_ids)
        if found is not None:
            differences.append(Difference(request_id, index, *found))
    if not differences and served.conflicts:
        request_id, index, position = served.conflicts[0]
        differences.append(Difference(request_id, index, position, "computed again", "other logits", "the same logits"))
    return num_compared, differences[0] if differences else None


def _first_difference(answer: Answer, alone: Answer, *, is_ended: bool) -> tuple[int, str, str, str] | None:
    """Position, what, got, alone. One that was ended may be shorter."""
    for position, (got, wanted) in enumerate(zip(answer.digests, alone.digests, strict=False)):
        if got != wanted:
            return position, "logits", got, wanted
    for position, (token_id, wanted_id) in enumerate(zip(answer.token_ids, alone.token_ids, strict=False)):
        if token_id != wanted_id:
            return position, "tokens", str(token_id), str(wanted_id)
    num_tokens, num_alone = len(answer.token_ids), len(alone.token_ids)
    if len(answer.digests) != num_tokens:
        return num_tokens, "number of rows", str(len(answer.digests)), str(num_tokens)
    if num_tokens > num_alone or (num_tokens < num_alone and not is_ended):
        return min(num_tokens, num_alone), "number of tokens", str(num_tokens), str(num_alone)
    if not is_ended and answer.finish_reason != alone.finish_reason:
        return num_tokens, "finish reason", answer.finish_reason, alone.finish_reason
    return None
