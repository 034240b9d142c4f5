"""Every state that three sequences and six blocks of two tokens can reach: each action at each point, no sampling.

At every state what is accepted, planned, sampled, failed or aborted next branches the walk, so it covers all orders of
these calls. A state is made anew for each of its successors, by the calls that led to it. What must hold: the
invariants at every state; a plan wherever there is work (no deadlock); no way back to a state on the same path, so
every path ends (no livelock, nobody starves); at each end all memory is free (no leak).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from ropeway.core.admission import Admission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.fair_service import VirtualTokenCounters
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, ServiceTerms
from ropeway.core.plan import StepPlan, StepResult
from ropeway.core.policy import Policy
from ropeway.core.predictive_admission import MIN_KEPT_STEPS, PredictiveAdmission
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.core.waiting_line import WaitingLine
from support.scheduling import STOP_TOKEN_ID, make_request, sampled_ids
from support.waves import WavePacing

NUM_SEQUENCES, NUM_BLOCKS, BLOCK_SIZE, TOKEN_BUDGET = 3, 6, 2, 3


@dataclass(frozen=True)
class Arrival:
    """What a sequence may be when it arrives."""

    num_prompt_tokens: int
    max_tokens: int
    is_background: bool = False


@dataclass(frozen=True)
class Walk:
    """Policy and admission, the arrivals to choose from, and how many may run."""

    make_policy: Callable[[], Policy]
    make_admission: Callable[[], Admission]
    arrivals: tuple[Arrival, ...]
    max_num_seqs: int = NUM_SEQUENCES
    can_fail: bool = True
    makes_waves: bool = False


@dataclass
class Coverage:
    """States (distinct), transitions between them, states where everybody has ended, and calls on the longest path."""

    num_states: int = 0
    num_transitions: int = 0
    num_ends: int = 0
    longest_path: int = 0


Call = Callable[[Scheduler], bool]  # on a scheduler; False where nothing came of it


@dataclass
class _Frame:
    key: int
    call: Call
    successors: Iterator[tuple[Call, tuple[Arrival, ...]]]


def walk(what: Walk, max_num_states: int | None = None) -> Coverage:
    """Depth first over every state. Raises AssertionError where something does not hold.

    max_num_states: leave off there, for a short form; then a part of the states was not seen.
    """
    coverage = Coverage()
    seen: set[int] = set()
    on_path: set[int] = set()
    path: list[_Frame] = []

    def enter(scheduler: Scheduler, call: Call, arrived: tuple[Arrival, ...]) -> None:
        key = hash(_state(scheduler, arrived))
        assert key not in on_path, "a livelock: the same state comes again"
        if key in seen:
            return
        seen.add(key)
        on_path.add(key)
        scheduler.check_invariants()
        if len(arrived) == NUM_SEQUENCES and not scheduler.has_work and scheduler._in_flight is None:
            coverage.num_ends += 1
            stats = scheduler.stats()
            assert stats.num_free_blocks == stats.num_blocks, "a leak"
            assert sum(stats.num_finished.values()) == NUM_SEQUENCES, "somebody was lost"
        path.append(_Frame(key, call, _successors(what, scheduler, arrived)))
        coverage.longest_path = max(coverage.longest_path, len(path))

    enter(_new_scheduler(what), lambda _: True, ())
    while path:
        following = next(path[-1].successors, None) if len(seen) != max_num_states else None
        if following is None:
            on_path.discard(path.pop().key)
            continue
        call, arrived = following
        scheduler = _new_scheduler(what)
        for frame in path:
            frame.call(scheduler)
        if call(scheduler):
            coverage.num_transitions += 1
            enter(scheduler, call, arrived)
    coverage.num_states = len(seen)
    return coverage


def _new_scheduler(what: Walk) -> Scheduler:
    return Scheduler(
        SchedulerLimits(what.max_num_seqs, TOKEN_BUDGET, NUM_BLOCKS * BLOCK_SIZE),
        KVManager([NUM_BLOCKS], BLOCK_SIZE),
        line=WaitingLine(what.make_policy, background_share=0.5),
        batching=ContinuousBatching(what.make_admission()),
        pacing=WavePacing(TOKEN_BUDGET, max_num_slices=2) if what.makes_waves else None,
    )


def _successors(
    what: Walk, scheduler: Scheduler, arrived: tuple[Arrival, ...]
) -> Iterator[tuple[Call, tuple[Arrival, ...]]]:
    """Every call that is possible in the state of `scheduler`, which is read at once and not kept."""
    now_s, plan, has_work = float(len(arrived)), scheduler._in_flight, scheduler.has_work
    calls: list[tuple[Call, tuple[Arrival, ...]]] = []
    for arrival in what.arrivals if len(arrived) < NUM_SEQUENCES else ():
        calls.append((partial(_add, _request(len(arrived), arrival), now_s), (*arrived, arrival)))
    for index in range(len(arrived)):
        calls.append((partial(_abort, str(index)), arrived))
    if plan is None:
        if has_work:
            calls.append((partial(_plan, now_s), arrived))
        return iter(calls)
    if what.can_fail:
        calls.append((partial(_fail, now_s), arrived))
    ids = sampled_ids(plan)
    for token_ids in product((1, STOP_TOKEN_ID), repeat=len(ids)):
        calls.append((partial(_commit, StepResult(plan.step_id, ids, token_ids), now_s), arrived))
    return iter(calls)


def _add(request: Request, now_s: float, scheduler: Scheduler) -> bool:
    scheduler.add(request, now_s)
    return True


def _abort(request_id: str, scheduler: Scheduler) -> bool:
    return bool(scheduler.abort(request_id))


def _plan(now_s: float, scheduler: Scheduler) -> bool:
    plan = scheduler.plan(now_s)
    assert plan is not None and plan.num_rows, "a deadlock: work, and none of it is done"
    return True


def _fail(now_s: float, scheduler: Scheduler) -> bool:
    scheduler.fail(_in_flight(scheduler), now_s)
    return True


def _commit(result: StepResult, now_s: float, scheduler: Scheduler) -> bool:
    scheduler.commit(_in_flight(scheduler), result, now_s)
    return True


def _in_flight(scheduler: Scheduler) -> StepPlan:
    assert scheduler._in_flight is not None
    return scheduler._in_flight


@cache
def _request(number: int, arrival: Arrival) -> Request:
    terms = ServiceTerms(
        tenant="abb"[number], weight=(1.0, 2.0, 2.0)[number], priority=1 - number, is_background=arrival.is_background
    )
    return make_request(str(number), arrival.num_prompt_tokens, arrival.max_tokens, terms=terms)


def _state(scheduler: Scheduler, arrived: tuple[Arrival, ...]) -> tuple[Any, ...]:
    """All that what comes next depends on, but for what predictive admission has learned of answers (its states are
    merged over that). Which block is whose does not matter: nothing is shared.
    """
    roster, line, plan = scheduler._roster, scheduler._line, scheduler._in_flight
    sequences = [
        (
            s.sequence_id,
            s.state.value,
            s.num_tokens,
            s.num_computed_tokens,
            s.num_prefill_tokens,
            s.num_recompute_tokens,
            s.num_slots,
            s.num_preemptions > 0,
        )
        for s in roster.sequences.values()
    ]
    return (
        arrived,
        tuple(sequences),
        tuple(roster.running),
        tuple(roster.decodes.sequences),
        None if plan is None else (plan.sequence_ids, plan.is_sampled, plan.layer_slice),
        _wave(scheduler),
        line.entitled and line.entitled.sequence_id,
        (line._num_owed_tokens, line._is_background_due),
        _caution(scheduler._batching.admission),
        _service(line._interactive),
        _service(line._background),
    )


def _wave(scheduler: Scheduler) -> tuple[int, ...]:
    """The one under way."""
    wave = scheduler._boarding._current_wave()
    return () if wave is None else (wave.sequence.sequence_id, wave.num_tokens, wave.num_slices, wave.num_done)


def _caution(admission: Admission) -> tuple[Any, ...]:
    """Of predictive admission: what preemptions taught it, and how old its outlook is."""
    if not isinstance(admission, PredictiveAdmission):
        return ()
    if admission._outlook is None or admission._outlook_age >= MIN_KEPT_STEPS:  # made anew when it is asked next
        return (admission._caution, None)
    return (admission._caution, admission._outlook_age)


def _service(policy: Policy) -> tuple[Any, ...]:
    """What virtual token counters remember; the other policies remember nothing."""
    if not isinstance(policy, VirtualTokenCounters):
        return ()
    tenants = policy._tenants
    accounts = [
        (t.name, t.counter, t.turn, [(u.name, u.counter) for u in t.users._accounts.values()].__repr__())
        for t in tenants._accounts.values()
    ]
    turns = sorted([turn for _, _, turn, _ in accounts] + [turn for _, turn in tenants._remembered.values()])
    last = tenants._last_listed
    return (
        tuple([(name, counter, turns.index(turn), users) for name, counter, turn, users in accounts]),
        tuple([(name, counter, turns.index(turn)) for name, (counter, turn) in tenants._remembered.items()]),
        tuple([(i, seat.is_newcomer, seat.num_charged) for i, seat in policy._seats.items()]),
        None if last is None or tenants.least() is not None else last.counter,
    )
