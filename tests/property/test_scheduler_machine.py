"""The scheduler under every order of calls: tiny pools, tight budgets, every policy and admission, any failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ropeway.core.batching import Batching, ContinuousBatching, StaticBatching
from ropeway.core.pacing import FixedTokenBudget, Pacing
from ropeway.core.params import ServiceTerms
from ropeway.core.plan import StepPlan, StepResult
from ropeway.core.scheduler import Scheduler
from ropeway.core.step_time import StepCosts
from ropeway.core.timed_pacing import PacingTargets, TimedPacing
from ropeway.core.waiting_line import WaitingLine
from ropeway.errors import InvalidRequestError, RequestTooLargeError
from support.schedulers import ADMISSIONS, POLICIES
from support.scheduling import STOP_TOKEN_ID, PlanModel, Track, make_request, make_scheduler, sampled_ids
from support.waves import WavePacing

BATCHINGS: dict[str, Callable[[], Batching]] = {
    **{name: lambda make=make: ContinuousBatching(make()) for name, make in ADMISSIONS.items()},  # type: ignore[misc]
    "static": StaticBatching,
    "static-padded": lambda: StaticBatching(is_padded=True),
}


COSTS = StepCosts(0.5, 0.25, 0.25, 0.01, 0.1)  # some steps have no room for one token of a prompt
DEEP_COSTS = StepCosts(0.5, 0.05, 0.05, 0.01, 0.1, 0.2)  # keys that cost much to read: chunks wait for waves
PACINGS: dict[str, Callable[[int], Pacing]] = {
    "tokens": FixedTokenBudget,
    "balanced": lambda budget: TimedPacing(PacingTargets(max_num_tokens=budget), COSTS),
    "latency": lambda budget: TimedPacing(PacingTargets(max_num_tokens=budget, objective="latency"), COSTS),
    "waves": lambda budget: WavePacing(budget, 3),
    "timed waves": lambda budget: TimedPacing(PacingTargets(max_num_tokens=budget), DEEP_COSTS, num_layers=4),
    "tpot": lambda budget: TimedPacing(PacingTargets(max_num_tokens=budget, tpot_s=0.9), COSTS),
}


@dataclass(frozen=True)
class Shape:
    """What a scheduler is made of. has_terms: requests differ in tenant, user, priority and class."""

    num_blocks: int
    block_size: int
    budget: int
    max_num_seqs: int
    num_groups: int
    batching: str
    pacing: str
    policy: str
    has_terms: bool
    asks_for_prefix_cache: bool

    @property
    def is_first_come(self) -> bool:
        return not self.has_terms and self.policy != "spf"

    @property
    def has_prefix_cache(self) -> bool:
        return self.asks_for_prefix_cache and not self.batching.startswith("static")  # which cannot have one

    def make(self) -> Scheduler:
        return make_scheduler(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            budget=self.budget,
            max_num_seqs=self.max_num_seqs,
            num_groups=self.num_groups,
            line=WaitingLine(POLICIES[self.policy], background_share=0.1),
            batching=BATCHINGS[self.batching](),
            pacing=PACINGS[self.pacing](self.budget),
            has_prefix_cache=self.has_prefix_cache,
        )


SHAPES = st.builds(
    Shape,
    num_blocks=st.integers(1, 9),
    block_size=st.integers(1, 4),
    budget=st.integers(1, 9),
    max_num_seqs=st.integers(1, 4),
    num_groups=st.integers(1, 2),
    batching=st.sampled_from(sorted(BATCHINGS)),
    pacing=st.sampled_from(sorted(PACINGS)),
    policy=st.sampled_from(sorted(POLICIES)),
    has_terms=st.booleans(),
    asks_for_prefix_cache=st.booleans(),
)
TERMS = st.builds(
    ServiceTerms,
    tenant=st.sampled_from("abc"),
    user=st.sampled_from([None, "x", "y"]),
    priority=st.integers(-2, 2),
    is_background=st.booleans(),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Every call goes through `_call`, which records it with its outcome, so that the whole run can be played again."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, tuple[Any, ...], Any]] = []
        self.in_flight: StepPlan | None = None
        self.num_requests = 0
        self.now_s = 0.0

    @initialize(shape=SHAPES)
    def start(self, shape: Shape) -> None:
        self.shape = shape
        self.scheduler = shape.make()
        self.model = PlanModel(shape.num_blocks, shape.block_size, shape.num_groups, shape.budget, shape.max_num_seqs)
        self.model.is_first_come, self.model.has_prefix_cache = shape.is_first_come, shape.has_prefix_cache
        self.model.is_kept = self.scheduler._roster.turns.is_kept

    def _call(self, method: str, *args: Any) -> Any:
        outcome = getattr(self.scheduler, method)(*args)
        self.log.append((method, args, outcome))
        return outcome

    @rule(
        num_prompt_tokens=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        min_tokens=st.integers(0, 3),
        terms=TERMS,
    )
    def add(self, num_prompt_tokens: int, max_tokens: int, n: int, min_tokens: int, terms: ServiceTerms) -> None:
        request = make_request(
            str(self.num_requests),
            num_prompt_tokens,
            max_tokens,
            terms=terms if self.shape.has_terms else None,
            n=n,
            min_tokens=min(min_tokens, max_tokens),
        )
        if num_prompt_tokens + max_tokens > self.shape.num_blocks * self.shape.block_size:
            try:
                self.scheduler.add(request, self.now_s)
            except RequestTooLargeError:
                return
            raise AssertionError("what can never fit was accepted")
        self.num_requests += 1
        self.model.add(self._call("add", request, self.now_s))

    @precondition(lambda self: self.model.unfinished)
    @rule(data=st.data())
    def add_an_id_in_use(self, data: st.DataObject) -> None:
        track = data.draw(st.sampled_from(self.model.unfinished))
        try:
            self.scheduler.add(make_request(track.sequence.request.request_id, 1, 1), self.now_s)
        except InvalidRequestError:
            return
        raise AssertionError("a request id in use was accepted")

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        had_work = bool(self.model.unfinished)
        assert self.scheduler.has_work == had_work
        self.in_flight = self._call("plan", self.now_s)
        assert (self.in_flight is not None) == had_work, "work, and none of it done"
        if self.in_flight is not None:
            self.model.apply(self.in_flight)

    @precondition(lambda self: self.in_flight is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.in_flight is not None
        ids = sampled_ids(self.in_flight)
        failed_ids = data.draw(st.sets(st.sampled_from(ids), max_size=1)) if ids else set()
        drawn_ids = tuple(i for i in ids if i not in failed_ids)
        token_ids = data.draw(st.tuples(*[st.integers(STOP_TOKEN_ID, 4)] * len(drawn_ids)))
        result = StepResult(self.in_flight.step_id, drawn_ids, token_ids, tuple(failed_ids))
        stopped = [i for i, t in zip(drawn_ids, token_ids, strict=True) if t == STOP_TOKEN_ID]
        may_end = [t for i, t in self.model.tracks.items() if i in stopped and t.finish_reason is None]
        expected = [t for t in may_end if _num_generated(t) >= t.sequence.request.params.min_tokens]
        self.model.take(self._call("commit", self.in_flight, result, self.now_s))
        self.in_flight = None
        assert all(track.finish_reason == "stop" for track in expected), "a stop token did not end its sequence"

    @precondition(lambda self: self.in_flight is not None)
    @rule(chance=st.integers(0, 9))
    def fail(self, chance: int) -> None:
        if chance == 0:  # rarely: it ends everything that runs
            assert self.in_flight is not None
            failed_ids = self.in_flight.sequence_ids
            self.model.take(self._call("fail", self.in_flight, self.now_s))
            self.in_flight = None
            assert all(self.model.tracks[i].finish_reason for i in failed_ids)

    @rule(number=st.integers(0, 30), is_abort=st.booleans(), index=st.integers(0, 2))
    def end(self, number: int, is_abort: bool, index: int) -> None:
        request_id = str(number)
        ending = [t for (name, i), t in self.model.by_name.items() if name == request_id and (is_abort or i == index)]
        open_tracks = [t for t in ending if t.finish_reason is None]
        free_before = self.scheduler.stats().num_free_blocks
        others = [t for t in self.model.tracks.values() if t not in open_tracks]
        held = len(_blocks_of(open_tracks) - _blocks_of(others))
        events = self._call("abort", request_id) if is_abort else self._call("stop", request_id, index)
        self.model.take(events)
        assert len(events) == len(open_tracks) and all(t.finish_reason for t in ending)
        if is_abort or not self.shape.batching.startswith("static"):
            assert self.scheduler.stats().num_free_blocks >= free_before + held, "blocks are not free at once"

    @invariant()
    def everything_is_in_its_place(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()
            self.model.check_counters(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self._drain()
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks and not self.scheduler.has_work
        self.model.add(self._call("add", make_request("last", 1, 1), self.now_s) if self._fits_two_tokens else ())
        self._drain()
        ended = [t for t in self.model.tracks.values() if t.sequence.request.request_id != "last"]
        assert all(t.is_forgotten for t in ended) or not self._fits_two_tokens, "the runner was not told to forget"
        self._replay()

    @property
    def _fits_two_tokens(self) -> bool:
        return self.shape.num_blocks * self.shape.block_size >= 2

    def _drain(self) -> None:
        """Once arrivals end, everybody finishes, in a bounded number of steps."""
        if self.in_flight is not None:
            self.commit_all(self.in_flight)
            self.in_flight = None
        unfinished = self.model.unfinished
        num_tokens = sum(t.sequence.max_num_tokens for t in unfinished)
        for _ in range((len(unfinished) + 1) * num_tokens):
            plan = self._call("plan", self.now_s)
            if plan is None:
                break
            self.model.apply(plan)
            self.commit_all(plan)
            self.everything_is_in_its_place()
        assert not self.model.unfinished, "somebody starves"

    def commit_all(self, plan: StepPlan) -> None:
        ids = sampled_ids(plan)
        self.model.take(self._call("commit", plan, StepResult(plan.step_id, ids, (1,) * len(ids)), self.now_s))

    def _replay(self) -> None:
        """The same calls on a new scheduler have the same outcomes."""
        scheduler = self.shape.make()
        plan = None
        for method, args, outcome in self.log:
            if method in ("commit", "fail"):
                args = (plan, *args[1:])
            again = getattr(scheduler, method)(*args)
            if method == "add":
                assert [s.sequence_id for s in again] == [s.sequence_id for s in outcome]
            else:
                assert again == outcome
            plan = again if method == "plan" else plan


def _num_generated(track: Any) -> int:
    return int(track.num_tokens - track.sequence.num_prompt_tokens)


# Without Phase.explain, which takes minutes on a failure here.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def _blocks_of(tracks: list[Track]) -> set[int]:
    return {block_id for track in tracks for table in track.sequence.block_ids[:1] for block_id in table}


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, phases=PHASES)
