"""Every state that three sequences and six blocks of two tokens can reach: each action at each point, no sampling.

At every state what is accepted, planned, sampled, failed or aborted next branches the walk, so it covers all orders of
these calls. What must hold: the invariants at every state; a plan wherever there is work (no deadlock); no way back
to a state on the same path, so every path ends (no livelock, nobody starves); at each end all memory is free (no leak).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from ropeway.core.admission import Admission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.fair_service import VirtualTokenCounters
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, ServiceTerms
from ropeway.core.plan import StepResult
from ropeway.core.policy import Policy
from ropeway.core.predictive_admission import MIN_KEPT_STEPS, PredictiveAdmission
from ropeway.core.prefix_index import PrefixMatch
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.core.sequence import SequenceState, WaitingReason
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


@dataclass
class _Frame:
    key: bytes | int
    successors: Iterator[tuple[Scheduler, tuple[Arrival, ...]]]


def walk(what: Walk, max_num_states: int | None = None) -> Coverage:
    """Depth first over every state. Raises AssertionError where something does not hold.

    max_num_states: leave off there, for a short form; then a part of the states was not seen.
    """
    limits = SchedulerLimits(what.max_num_seqs, TOKEN_BUDGET, NUM_BLOCKS * BLOCK_SIZE)
    first = Scheduler(
        limits,
        KVManager([NUM_BLOCKS], BLOCK_SIZE),
        line=WaitingLine(what.make_policy, background_share=0.5),
        batching=ContinuousBatching(what.make_admission()),
        pacing=WavePacing(TOKEN_BUDGET, max_num_slices=2) if what.makes_waves else None,
    )
    coverage = Coverage()
    seen: set[int] = set()
    on_path: set[int] = set()
    path: list[_Frame] = []

    def enter(scheduler: Scheduler, arrived: tuple[Arrival, ...]) -> None:
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
        path.append(_Frame(key, _successors(what, _freeze(scheduler), arrived)))
        coverage.longest_path = max(coverage.longest_path, len(path))

    enter(first, ())
    while path:
        following = next(path[-1].successors, None) if len(seen) != max_num_states else None
        if following is None:
            on_path.discard(path.pop().key)  # type: ignore[arg-type]
            continue
        coverage.num_transitions += 1
        enter(*following)
    coverage.num_states = len(seen)
    return coverage


def _successors(
    what: Walk, frozen: bytes, arrived: tuple[Arrival, ...]
) -> Iterator[tuple[Scheduler, tuple[Arrival, ...]]]:
    """Every state one call away."""
    for arrival in what.arrivals if len(arrived) < NUM_SEQUENCES else ():
        scheduler = pickle.loads(frozen)
        scheduler.add(_request(len(arrived), arrival), float(len(arrived)))
        yield scheduler, (*arrived, arrival)
    now_s = float(len(arrived))
    for index in range(len(arrived)):
        scheduler = pickle.loads(frozen)
        if scheduler.abort(str(index)):
            yield scheduler, arrived
    scheduler = pickle.loads(frozen)
    if (plan := scheduler._in_flight) is None:
        if scheduler.has_work:
            plan = scheduler.plan(now_s)
            assert plan is not None and plan.num_rows, "a deadlock: work, and none of it is done"
            yield scheduler, arrived
        return
    if what.can_fail:
        scheduler.fail(plan, now_s)
        yield scheduler, arrived
    ids = sampled_ids(plan)
    for token_ids in product((1, STOP_TOKEN_ID), repeat=len(ids)):
        scheduler = pickle.loads(frozen)
        scheduler.commit(scheduler._in_flight, StepResult(plan.step_id, ids, token_ids), now_s)
        yield scheduler, arrived


class _Pickler(pickle.Pickler):
    """Copies what a scheduler changes; what never changes is shared, which is what most of the time would go to."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) in _SHARED_TYPES:
            _shared[id(value)] = value
            return _share, (id(value),)
        return NotImplemented


_SHARED_TYPES = {Request, SchedulerLimits, PrefixMatch, SequenceState, WaitingReason}
_shared: dict[int, Any] = {}


def _share(key: int) -> Any:
    return _shared[key]


def _freeze(scheduler: Scheduler) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, -1).dump(scheduler)
    return buffer.getvalue()


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
