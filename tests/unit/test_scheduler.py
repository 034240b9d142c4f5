"""The scheduler's choices, step by step, under continuous batching."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ropeway.core.admission import OptimisticAdmission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import ServiceTerms
from ropeway.core.plan import SequenceEvent, StepPlan, StepResult
from ropeway.core.policy import PriorityOrder
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.core.sequence import Sequence, SequenceState, WaitingReason
from ropeway.core.waiting_line import WaitingLine
from ropeway.errors import ConfigError, InvalidRequestError, RequestTooLargeError
from support.scheduling import STOP_TOKEN_ID, PlanModel, make_request, make_scheduler, result_of, run_step


def rows(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """(sequence id, start, tokens, sampled) of each row."""
    assert plan is not None
    return list(zip(plan.sequence_ids, plan.starts, plan.num_tokens, plan.is_sampled, strict=True))


def test_nothing_to_do() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_work and scheduler.plan(0.0) is None


# -- the token budget --------------------------------------------------------------------------------------------------


def test_decodes_first_then_running_prefills_then_boarding() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request("a", 4, 9), 0.0)
    scheduler.add(make_request("b", 12, 9), 0.0)
    assert rows(run_step(scheduler)[0]) == [(0, 0, 4, True), (1, 0, 4, False)]
    scheduler.add(make_request("c", 3, 9), 0.0)
    # b is longer than the step: it takes half of it, and what c leaves
    assert rows(run_step(scheduler)[0]) == [(0, 4, 1, True), (1, 4, 4, False), (2, 0, 3, True)]
    assert rows(run_step(scheduler)[0]) == [(0, 5, 1, True), (2, 3, 1, True), (1, 8, 4, True)]
    # decodes in the order in which they began to: c before b
    assert rows(run_step(scheduler)[0]) == [(0, 6, 1, True), (2, 4, 1, True), (1, 12, 1, True)]


def test_a_running_prefill_without_budget_has_no_row() -> None:
    scheduler = make_scheduler(budget=6, block_size=4)
    scheduler.add(make_request("a", 1, 2), 0.0)
    for name in "bcd":
        scheduler.add(make_request(name, 20, 9), 0.0)
    assert rows(run_step(scheduler)[0]) == [(0, 0, 1, True), (1, 0, 3, False), (2, 0, 2, False)]
    assert rows(run_step(scheduler)[0]) == [(0, 1, 1, True), (1, 3, 2, False), (2, 2, 2, False), (3, 0, 1, False)]
    assert rows(run_step(scheduler)[0]) == [(1, 5, 3, False), (2, 4, 3, False)]


def test_a_prompt_longer_than_the_step_takes_all_of_it_while_nobody_waits() -> None:
    scheduler = make_scheduler(budget=6)
    scheduler.add(make_request("a", 20, 9), 0.0)
    assert [rows(run_step(scheduler)[0])[0][2] for _ in range(4)] == [6, 6, 6, 2]


def test_short_prompts_pass_a_long_one() -> None:
    scheduler = make_scheduler(budget=16, num_blocks=100)
    scheduler.add(make_request("long", 200, 2), 0.0)
    run_step(scheduler)
    for i in range(4):
        scheduler.add(make_request(f"short {i}", 8, 2), 0.0)
        plan, events = run_step(scheduler)
        assert f"short {i}" in [e.request_id for e in events], "it waited behind the long prompt"
        assert plan.num_tokens[plan.sequence_ids.index(0)] >= 16 // 2 - 2


def test_two_prefills_in_flight_and_the_older_goes_first() -> None:
    scheduler = make_scheduler(budget=6)
    scheduler.add(make_request("a", 5, 9), 0.0)
    scheduler.add(make_request("b", 9, 9), 0.0)
    run_step(scheduler)
    scheduler.abort("a")
    scheduler.add(make_request("c", 9, 9), 0.0)
    assert rows(run_step(scheduler)[0]) == [(1, 1, 3, False), (2, 0, 3, False)]
    assert rows(run_step(scheduler)[0]) == [(1, 4, 5, True), (2, 3, 1, False)]
    scheduler.add(make_request("d", 9, 9), 0.0)
    assert rows(run_step(scheduler)[0]) == [(1, 9, 1, True), (2, 4, 5, True)]


def test_no_more_run_than_max_num_seqs_or_the_budget() -> None:
    for max_num_seqs, budget in ((3, 64), (8, 3)):
        scheduler = make_scheduler(max_num_seqs=max_num_seqs, budget=budget)
        for i in range(6):
            scheduler.add(make_request(str(i), 1, 4), 0.0)
        plan, _ = run_step(scheduler)
        assert plan.sequence_ids == (0, 1, 2) and scheduler.stats().num_running == 3


def test_the_n_sequences_of_a_request_run_side_by_side() -> None:
    scheduler = make_scheduler()
    sequences = scheduler.add(make_request("a", 3, 2, n=3), 0.0)
    assert [(s.sequence_id, s.index) for s in sequences] == [(0, 0), (1, 1), (2, 2)]
    plan, events = run_step(scheduler)
    assert plan.sequence_ids == (0, 1, 2)
    assert [(e.request_id, e.index) for e in events] == [("a", 0), ("a", 1), ("a", 2)]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_granted_whole_and_decoding_grows_block_by_block() -> None:
    scheduler = make_scheduler(block_size=4, budget=4)
    scheduler.add(make_request("a", 7, 9), 0.0)
    granted = [len(run_step(scheduler)[0].grants[0].block_ids) for _ in range(8)]
    # steps: positions 0-3, 4-6, then 7, 8 (a new block), 9, 10, 11, 12 (a new block)
    assert granted == [2, 0, 0, 1, 0, 0, 0, 1]


def test_every_cache_group_is_granted_blocks_of_its_own_pool() -> None:
    limits = SchedulerLimits(8, 64, 1000)
    scheduler = Scheduler(limits, KVManager([10, 6], 4))
    assert scheduler.max_model_len == 24
    scheduler.add(make_request("a", 4, 8), 0.0)
    scheduler.add(make_request("b", 5, 8), 0.0)
    plan, _ = run_step(scheduler)
    assert [g.indptr for g in plan.grants] == [(0, 1, 3)] * 2 and [g.block_ids for g in plan.grants] == [(0, 1, 2)] * 2
    plan, _ = run_step(scheduler)
    assert [g.indptr for g in plan.grants] == [(0, 1, 1)] * 2
    assert scheduler.stats().num_blocks == 6 and scheduler.stats().num_free_blocks == 2
    scheduler.check_invariants()


def test_the_watermark_is_kept_free_unless_nothing_runs() -> None:
    batching = ContinuousBatching(OptimisticAdmission(2))
    scheduler = make_scheduler(num_blocks=4, block_size=4, batching=batching)
    scheduler.add(make_request("a", 12, 4), 0.0)  # 3 of 4 blocks: fits although it leaves fewer than 2
    scheduler.add(make_request("b", 1, 1), 0.0)
    assert run_step(scheduler)[0].sequence_ids == (0,)
    assert run_step(scheduler)[0].sequence_ids == (0,)  # 1 block is free, and stays so
    scheduler.abort("a")
    assert run_step(scheduler)[0].sequence_ids == (1,)


def test_nobody_overtakes_one_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_request("a", 8, 4), 0.0)
    scheduler.add(make_request("large", 12, 4), 0.0)
    scheduler.add(make_request("small", 1, 1), 0.0)
    assert run_step(scheduler)[0].sequence_ids == (0,)
    assert scheduler.stats().num_waiting == 2


def test_blocks_are_free_for_the_plan_after_the_last_token() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    scheduler.add(make_request("a", 6, 2), 0.0)
    scheduler.add(make_request("b", 6, 2), 0.0)
    run_step(scheduler)
    plan, events = run_step(scheduler)
    assert plan.sequence_ids == (0,) and events[0].finish_reason == "length"
    plan, _ = run_step(scheduler)
    assert plan.sequence_ids == (1,) and plan.finished_ids == (0,) and plan.grants[0].block_ids == (0, 1)


def test_who_waits_knows_why() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=8, max_num_seqs=2)
    first, second = (scheduler.add(make_request(name, 8, 8), 0.0)[0] for name in "ab")
    third = scheduler.add(make_request("c", 1, 1), 0.0)[0]
    run_step(scheduler)
    assert (second.waiting_reason, third.waiting_reason) == (WaitingReason.BUDGET, WaitingReason.POLICY)
    run_step(scheduler)
    assert (second.waiting_reason, third.waiting_reason) == (WaitingReason.CAPACITY, WaitingReason.POLICY)
    assert first.state is SequenceState.RUNNING


# -- preemption --------------------------------------------------------------------------------------------------------


def test_the_last_admitted_is_preempted_and_recomputed_in_its_place_in_line() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    scheduler.add(make_request("a", 2, 6), 0.0)
    scheduler.add(make_request("b", 2, 6), 0.0)
    run_step(scheduler)
    run_step(scheduler)  # both grow into their second block: the pool is full
    run_step(scheduler)
    scheduler.add(make_request("c", 1, 1), 0.0)
    plan, _ = run_step(scheduler)
    assert plan.sequence_ids == (0,) and plan.preempted_ids == (1,)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_preempted, stats.num_waiting, stats.num_preemptions) == (1, 1, 1, 1)
    run_step(scheduler)
    plan, events = run_step(scheduler)
    assert events[-1].finish_reason == "length"
    plan, _ = run_step(scheduler)
    # 4 positions of b were computed before; its 5th token was sampled and never computed. c comes after it.
    assert rows(plan) == [(1, 0, 5, True), (2, 0, 1, True)]
    stats = scheduler.stats()
    assert (stats.num_recomputed_tokens, stats.num_prompt_tokens, stats.num_preemptions) == (4, 5, 1)


def test_the_first_in_policy_order_is_spared_and_the_last_preempted() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=2, line=WaitingLine(lambda: PriorityOrder(0.0)))
    for priority, name in ((3, "a"), (2, "b"), (1, "c")):
        scheduler.add(make_request(name, 4, 6, terms=ServiceTerms(priority=priority)), 0.0)
        run_step(scheduler)
    # the pool is full; a and c need a block
    plan, _ = run_step(scheduler)
    assert plan.preempted_ids == (0,) and plan.sequence_ids == (1, 2)
    scheduler.abort("b")
    scheduler.add(make_request("d", 2, 6), 0.0)
    assert run_step(scheduler)[0].sequence_ids == (2, 3, 0)  # the preempted kept its place in line, the last


def test_nobody_boards_in_a_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    scheduler.add(make_request("a", 4, 6), 0.0)
    scheduler.add(make_request("b", 6, 4), 0.0)
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert plan.preempted_ids == (1,) and plan.sequence_ids == (0,)
    assert scheduler.stats().num_free_blocks == 2


def test_a_sequence_preempted_twice_counts_what_it_computed_twice() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, budget=5)
    model = PlanModel(num_blocks=4, block_size=2, num_groups=1, budget=5, max_num_seqs=8)
    sequences = scheduler.add(make_request("a", 2, 6, n=3), 0.0)
    model.add(sequences)
    while scheduler.has_work:
        plan, events = run_step(scheduler)
        model.apply(plan)
        model.take(events)
    assert [s.num_preemptions for s in sequences] == [0, 1, 2]
    model.check_counters(scheduler)
    assert scheduler.stats().num_recomputed_tokens == 7 and scheduler.stats().num_prompt_tokens == 6


# -- how sequences end -------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_sequence() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, 9), 0.0)
    assert run_step(scheduler)[1] == [SequenceEvent("a", 0, (1,), None)]
    assert run_step(scheduler, STOP_TOKEN_ID)[1] == [SequenceEvent("a", 0, (STOP_TOKEN_ID,), "stop")]
    assert not scheduler.has_work


def test_a_stop_token_ends_nothing_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, 9, min_tokens=2), 0.0)
    reasons = [run_step(scheduler, STOP_TOKEN_ID)[1][0].finish_reason for _ in range(3)]
    assert reasons == [None, None, "stop"]


def test_the_last_token_ends_by_length_unless_it_stops() -> None:
    for token_id, reason in ((1, "length"), (STOP_TOKEN_ID, "stop")):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 3, 2), 0.0)
        run_step(scheduler)
        assert run_step(scheduler, token_id)[1][0].finish_reason == reason


def test_abort_ends_all_that_is_unfinished_of_a_request_once() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add(make_request("a", 3, 9, n=3), 0.0)
    run_step(scheduler)
    scheduler.stop("a", 1)
    assert scheduler.abort("a") == [SequenceEvent("a", 0, (), "abort"), SequenceEvent("a", 2, (), "abort")]
    assert scheduler.abort("a") == [] and scheduler.abort("unknown") == []
    assert scheduler.stats().num_used_blocks == 0 and scheduler.plan(0.0) is None
    assert scheduler.stats().num_finished == {"stop": 1, "length": 0, "abort": 2, "error": 0}


def test_a_recompute_is_chunked_and_samples_at_its_end() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, budget=4)
    scheduler.add(make_request("a", 2, 6), 0.0)
    scheduler.add(make_request("b", 2, 6), 0.0)
    plans = []
    while scheduler.has_work:
        plans.append(run_step(scheduler)[0])
    recompute = [row for plan in plans[4:] for row in rows(plan) if row[0] == 1]
    # 2 prompt tokens and 3 generated ones
    assert recompute == [(1, 0, 4, False), (1, 4, 1, True), (1, 5, 1, True), (1, 6, 1, True)]


def test_abort_of_a_preempted_sequence() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    scheduler.add(make_request("a", 4, 6), 0.0)
    scheduler.add(make_request("b", 6, 4), 0.0)
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.stats().num_preempted == 1
    assert scheduler.abort("b") == [SequenceEvent("b", 0, (), "abort")]
    scheduler.check_invariants()
    assert run_step(scheduler)[0].finished_ids == (1,)


@pytest.mark.parametrize("end", [lambda s: s.abort("a"), lambda s: s.stop("a", 0)])
def test_late_results_of_an_ended_sequence_are_dropped(end: Callable[[Scheduler], list[SequenceEvent]]) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, 9), 0.0)
    scheduler.add(make_request("b", 3, 9), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and len(end(scheduler)) == 1
    assert scheduler.stats().num_used_blocks == 1  # those of a are free at once
    assert scheduler.commit(plan, result_of(plan), 0.0) == [SequenceEvent("b", 0, (1,), None)]
    assert run_step(scheduler)[0].finished_ids == (0,)


def test_stop_ends_one_sequence() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, 9, n=2), 0.0)
    run_step(scheduler)
    assert scheduler.stop("a", 1) == [SequenceEvent("a", 1, (), "stop")]
    assert scheduler.stop("a", 1) == [] and scheduler.stop("a", 7) == [] and scheduler.stop("unknown", 0) == []
    assert run_step(scheduler)[0].sequence_ids == (0,)


def test_a_failed_row_ends_alone() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, 3, 9), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    events = scheduler.commit(plan, StepResult(plan.step_id, (0, 2), (5, 6), failed_sequence_ids=(1,)), 0.0)
    assert events == [
        SequenceEvent("a", 0, (5,)),
        SequenceEvent("c", 0, (6,)),
        SequenceEvent("b", 0, (), "error"),
    ]
    assert scheduler.stats().num_running == 2


def test_a_failed_step_ends_its_sequences_and_repeats_its_announcements() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    scheduler.add(make_request("a", 4, 6), 0.0)
    scheduler.add(make_request("b", 6, 4), 0.0)
    run_step(scheduler)
    scheduler.add(make_request("done", 1, 1), 0.0)
    scheduler.abort("done")
    plan = scheduler.plan(0.0)
    assert plan is not None and (plan.sequence_ids, plan.preempted_ids, plan.finished_ids) == ((0,), (1,), (2,))
    assert scheduler.fail(plan, 0.0) == [SequenceEvent("a", 0, (), "error")]
    again, _ = run_step(scheduler)
    assert again.sequence_ids == (1,) and again.preempted_ids == (1,) and again.finished_ids == (2, 0)
    assert (scheduler.stats().num_failed_steps, scheduler.stats().num_steps) == (1, 3)
    scheduler.check_invariants()


def test_only_what_is_in_flight_is_committed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, 9), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    with pytest.raises(AssertionError, match="neither committed nor failed"):
        scheduler.plan(0.0)
    for bad in (
        StepResult(plan.step_id + 1, (0,), (1,)),
        StepResult(plan.step_id, (), ()),
        StepResult(plan.step_id, (0,), ()),
        StepResult(plan.step_id, (1,), (1,)),
    ):
        with pytest.raises(AssertionError):
            scheduler.commit(plan, bad, 0.0)
    scheduler.commit(plan, result_of(plan), 0.0)
    with pytest.raises(AssertionError):
        scheduler.commit(plan, result_of(plan), 0.0)
    with pytest.raises(AssertionError):
        scheduler.fail(plan, 0.0)


# -- arrivals ----------------------------------------------------------------------------------------------------------


def test_what_exceeds_the_context_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(max_model_len=20)
    scheduler.add(make_request("a", 12, 8), 0.0)
    with pytest.raises(RequestTooLargeError, match=r"prompt \(12\) \+ max_tokens \(9\) is 21 tokens.*context of 20"):
        scheduler.add(make_request("b", 12, 9), 0.0)


def test_what_exceeds_the_pool_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    assert scheduler.max_model_len == 16
    scheduler.add(make_request("a", 12, 4), 0.0)
    with pytest.raises(RequestTooLargeError, match=r"17 tokens, above the KV pool of 4 blocks \(it needs 5 of 4\)"):
        scheduler.add(make_request("b", 13, 4), 0.0)
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.stats().num_preemptions == 0


def test_an_empty_prompt_and_an_id_in_use_are_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        scheduler.add(make_request("a", 0, 4), 0.0)
    scheduler.add(make_request("a", 1, 4, n=2), 0.0)
    scheduler.stop("a", 0)
    with pytest.raises(InvalidRequestError, match="'a' is in use") as refusal:
        scheduler.add(make_request("a", 1, 4), 0.0)
    assert refusal.value.param == "request_id"
    scheduler.abort("a")
    assert scheduler.add(make_request("a", 1, 4), 0.0)[0].sequence_id == 2  # ids of sequences are never used again


def test_requests_that_first_ran_are_told_once() -> None:
    scheduler = make_scheduler(budget=4, num_blocks=6, block_size=2)
    for name in "ab":
        scheduler.add(make_request(name, 3, 9, n=2), 0.0)
    told = []
    while scheduler.has_work:
        run_step(scheduler)
        told += scheduler.take_started_ids()
        assert scheduler.take_started_ids() == []
    assert scheduler.stats().num_preemptions > 0 and told == ["a", "b"]


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_are_at_least_one(name: str) -> None:
    numbers = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1}
    SchedulerLimits(**numbers)
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        SchedulerLimits(**(numbers | {name: 0}))


# -- the invariant checker ---------------------------------------------------------------------------------------------


def _corruptions() -> dict[str, Callable[[Scheduler], object]]:
    def first(scheduler: Scheduler) -> Sequence:
        return next(iter(scheduler._roster.running.values()))

    def share(scheduler: Scheduler) -> None:
        a, b = list(scheduler._roster.running.values())[:2]
        b.block_ids[0][0] = a.block_ids[0][0]

    def heap(scheduler: Scheduler) -> list[tuple[tuple[float, int], Sequence]]:
        return scheduler._line._interactive._line._heap  # type: ignore[attr-defined]

    def waiting(scheduler: Scheduler) -> Sequence:
        return heap(scheduler)[0][1]

    def drop_from_order(scheduler: Scheduler) -> None:
        line = scheduler._line._interactive._line  # type: ignore[attr-defined]
        del line._members[heap(scheduler)[0][1].sequence_id]

    return {
        "among the running is not": lambda s: setattr(first(s), "state", SequenceState.WAITING),
        "finished, and nowhere": lambda s: setattr(waiting(s), "state", SequenceState.FINISHED),
        "a waiting sequence holds memory": lambda s: setattr(waiting(s), "num_slots", 4),
        "against its count": lambda s: setattr(waiting(s), "num_preemptions", 1),
        "preempted miscounted": lambda s: setattr(s._roster, "num_preempted", 1),
        "the line and the waiting differ": drop_from_order,
        "lost an entry": lambda s: heap(s).pop(),
        "a rank has changed": lambda s: setattr(waiting(s), "rank", (1.0, 1)),
        "policy order": lambda s: heap(s).reverse(),
        "without its request": lambda s: s._roster._requests.update({"0": ()}),
        "counts as started": lambda s: s._roster._started_ids.add("gone"),
        "a running sequence is lost": lambda s: s._roster.sequences.pop(0),
        "a finished sequence is not gone": lambda s: setattr(first(s), "finish_reason", "stop"),
        "an unfinished sequence is retained": lambda s: s._roster.retained.update({0: _retained(first(s))}),
        "slots differ": lambda s: first(s).block_ids[0].pop(),
        "holders of a block are miscounted": share,
        "than are known": lambda s: setattr(first(s), "num_computed_tokens", 99),
        "holders of a block are .*counted": lambda s: s._kv._pools[0].take(1),
        "do not add up": lambda s: s._kv._pools[0]._blank_ids.append(0),
        "a block is free twice": lambda s: s._kv._pools[0]._blank_ids.append(63),
        "more sequences run": lambda s: setattr(s, "_limits", SchedulerLimits(1, 64, 1000)),
    }


def _retained(sequence: Sequence) -> Sequence:
    copy = Sequence(sequence.sequence_id, sequence.request, 0)
    copy.state = SequenceState.RETAINED
    return copy


@pytest.mark.parametrize("violation", _corruptions())
def test_the_invariant_checker_sees(violation: str) -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for i in range(4):
        scheduler.add(make_request(str(i), 3, 9), 0.0)
    run_step(scheduler)
    scheduler.check_invariants()
    _corruptions()[violation](scheduler)
    with pytest.raises(AssertionError, match=violation):
        scheduler.check_invariants()
