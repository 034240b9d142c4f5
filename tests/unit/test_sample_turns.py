"""Beside others a request counts as one, however many samples it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ropeway.core.fair_service import VirtualTokenCounters
from ropeway.core.kv_manager import KVManager
from ropeway.core.limits import QueueLimits
from ropeway.core.params import ServiceTerms
from ropeway.core.plan import StepPlan
from ropeway.core.policy import FirstComeFirstServed, Policy
from ropeway.core.recipe import SchedulerRecipe
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.core.sequence import Sequence, SequenceState
from ropeway.core.step_time import StepCosts, StepWork
from ropeway.core.timed_pacing import Objective, PacingTargets, TimedPacing
from ropeway.core.waiting_line import WaitingLine
from support.scheduling import make_request, result_of, run_step

COSTS = StepCosts(6e-3, 6e-4, 6e-4, 0.0, 6e-4)  # a step of 5 decodes takes twice the fixed part


def scheduler_of(
    objective: Objective = "balanced",
    tpot_s: float | None = None,
    max_num_seqs: int = 256,
    make_policy: Callable[[], Policy] = FirstComeFirstServed,
) -> Scheduler:
    targets = PacingTargets(max_num_tokens=2048, objective=objective, tpot_s=tpot_s)
    return Scheduler(
        SchedulerLimits(max_num_seqs, 2048, 100_000),
        KVManager([20_000], 16),
        line=WaitingLine(make_policy),
        pacing=TimedPacing(targets, COSTS),
    )


def add_single(scheduler: Scheduler, count: int, max_tokens: int = 500) -> None:
    for number in range(count):
        scheduler.add(make_request(f"single {number}", 20, max_tokens), 0.0)


def step(scheduler: Scheduler) -> StepPlan:
    """One that takes what the costs say."""
    plan = scheduler.plan(0.0)
    assert plan is not None
    work = StepWork(sum(plan.num_tokens), 0.0, sum(plan.is_sampled), 0.0)
    scheduler.commit(plan, result_of(plan), COSTS.seconds(work))
    scheduler.check_invariants()
    return plan


def num_running(scheduler: Scheduler, request_id: str) -> int:
    return sum(s.state == "running" for s in scheduler.progress(request_id))


@pytest.mark.parametrize("objective", ["balanced", "latency"])
@pytest.mark.parametrize("is_first", [True, False])
def test_eight_samples_make_the_steps_of_31_others_hardly_longer(objective: Objective, is_first: bool) -> None:
    scheduler = scheduler_of(objective)
    if is_first:
        scheduler.add(make_request("eight", 20, 500, n=8), 0.0)
    add_single(scheduler, 31)
    if not is_first:
        scheduler.add(make_request("eight", 20, 500, n=8), 0.0)
    most_s = 0.0
    for _ in range(100):
        plan = step(scheduler)
        if set(plan.num_tokens) == {1}:
            most_s = max(most_s, COSTS.seconds(StepWork(plan.num_rows, 0.0, plan.num_rows, 0.0)))
    assert 2 <= num_running(scheduler, "eight") <= 3
    assert most_s <= 1.05 * COSTS.seconds(StepWork(32, 0.0, 32, 0.0))
    assert scheduler.stats().num_waiting == 8 - num_running(scheduler, "eight")


@pytest.mark.parametrize(("num_single", "most"), [(0, 8), (1, 6), (4, 2), (16, 2), (32, 2), (64, 3)])
def test_every_request_gets_as_much_of_the_time_as_another(num_single: int, most: int) -> None:
    """Beside a single one it may double the steps, beside 4 add a quarter; and always a little more."""
    scheduler = scheduler_of()
    add_single(scheduler, num_single)
    scheduler.add(make_request("eight", 20, 500, n=8), 0.0)
    for _ in range(200):
        step(scheduler)
    assert num_running(scheduler, "eight") == most
    if num_single:
        alone_s, now_s = (COSTS.seconds(StepWork(count, 0.0, count, 0.0)) for count in (num_single, num_single + most))
        assert now_s <= (1 + 1 / num_single + 0.04) * alone_s


def test_all_of_them_are_answered_one_after_the_other() -> None:
    scheduler = scheduler_of()
    add_single(scheduler, 16, max_tokens=2000)
    scheduler.add(make_request("eight", 20, 5, n=8), 0.0)
    ended: list[int] = []
    for _ in range(150):
        plan = scheduler.plan(0.0)
        assert plan is not None
        events = scheduler.commit(plan, result_of(plan), 0.02)
        ended += [event.index for event in events if event.request_id == "eight" and event.finish_reason]
        scheduler.check_invariants()
    assert ended == list(range(8))
    assert scheduler.progress("eight") == () and scheduler.stats().num_waiting == 0


def test_requests_of_several_samples_alone_run_all_of_them() -> None:
    scheduler = scheduler_of()
    for number in range(4):
        scheduler.add(make_request(str(number), 20, 500, n=8), 0.0)
    for _ in range(40):
        step(scheduler)
    assert scheduler.stats().num_running == 32


@pytest.mark.parametrize(("objective", "tpot_s"), [("throughput", None), ("balanced", 10.0)])
def test_for_throughput_and_within_a_target_nobody_is_held_back(objective: Objective, tpot_s: float | None) -> None:
    scheduler = scheduler_of(objective, tpot_s)
    add_single(scheduler, 31)
    scheduler.add(make_request("eight", 20, 500, n=8), 0.0)
    for _ in range(40):
        step(scheduler)
    assert scheduler.stats().num_running == 39


def test_background_samples_are_not_held_and_hold_nobody_back() -> None:
    scheduler = scheduler_of()
    background = ServiceTerms(is_background=True)
    scheduler.add(make_request("many", 20, 500, n=8, terms=background), 0.0)
    for number in range(31):
        scheduler.add(make_request(str(number), 20, 500, terms=background), 0.0)
    scheduler.add(make_request("eight", 20, 500, n=8), 0.0)
    for _ in range(60):
        step(scheduler)
    assert num_running(scheduler, "many") == num_running(scheduler, "eight") == 8


def test_held_samples_end_when_their_request_is_aborted_or_out_of_time() -> None:
    for ending in ("abort", "timeout", "stop"):
        scheduler = scheduler_of()
        add_single(scheduler, 31)
        terms = ServiceTerms(timeout_s=5.0)
        sequences = scheduler.add(make_request("eight", 20, 500, n=8, terms=terms), 0.0)
        for _ in range(5):
            step(scheduler)
        if ending == "abort":
            scheduler.abort("eight")
        elif ending == "timeout":
            scheduler.expire(6.0)
        else:
            for index in reversed(range(8)):  # those held first
                scheduler.stop("eight", index)
                scheduler.check_invariants()
        scheduler.check_invariants()
        assert all(s.state is SequenceState.FINISHED for s in sequences)
        for _ in range(3):
            step(scheduler)
        assert scheduler.stats().num_running == 31 and scheduler.stats().num_waiting == 0


@pytest.mark.parametrize("costs", [{}, {"step_fixed_s": 6e-3, "step_token_s": 6e-4, "step_row_s": 6e-4}])
def test_a_static_batch_has_all_samples_in_it(costs: dict[str, float]) -> None:
    recipe = SchedulerRecipe(
        max_num_seqs=16, max_num_batched_tokens=512, max_model_len=100, num_kv_blocks=100, batching="static", **costs
    )
    scheduler = recipe.make()
    scheduler.add(make_request("single", 20, 9), 0.0)
    scheduler.add(make_request("eight", 20, 9, n=8), 0.0)
    assert run_step(scheduler)[0].num_rows == 9


def test_extra_samples_are_those_of_all_requests_in_turn() -> None:
    scheduler = scheduler_of()
    add_single(scheduler, 1)
    for name in ("first", "second"):
        scheduler.add(make_request(name, 20, 500, n=64), 0.0)
    for _ in range(60):
        step(scheduler)
    first, second = num_running(scheduler, "first"), num_running(scheduler, "second")
    assert first >= second >= first - 1 > 3


def test_the_last_sample_of_a_request_is_one_like_any_other() -> None:
    """It gives the account no room for the extra samples of another."""
    scheduler = scheduler_of()
    add_single(scheduler, 10)
    for number in range(20):
        scheduler.add(make_request(f"two {number}", 20, 500, n=2), 0.0)
        scheduler.stop(f"two {number}", 0)
    scheduler.add(make_request("many", 20, 500, n=128), 0.0)
    for _ in range(60):
        step(scheduler)
    assert num_running(scheduler, "many") <= 3


@pytest.mark.parametrize(
    "terms", [{"tenant": "b"}, {"user": "somebody else"}, {"priority": -100}], ids=lambda terms: next(iter(terms))
)
def test_requests_of_another_account_or_priority_keep_nobody_back(terms: dict[str, Any]) -> None:
    scheduler = scheduler_of()
    add_single(scheduler, 31)
    scheduler.add(make_request("eight", 20, 500, n=8, terms=ServiceTerms(**terms)), 0.0)
    for _ in range(20):
        step(scheduler)
    assert num_running(scheduler, "eight") == 8


@pytest.mark.parametrize("max_num_seqs", [8, 16])
def test_where_places_are_scarce_the_policy_decides(max_num_seqs: int) -> None:
    """Two tenants who want more than there is get as much of it, one with many requests and one with many samples."""
    scheduler = scheduler_of(max_num_seqs=max_num_seqs, make_policy=VirtualTokenCounters)
    tokens = {"a": 0, "b": 0}
    for number in range(100):
        scheduler.add(make_request(f"a {number}", 20, 20, terms=ServiceTerms(tenant="a")), 0.0)
    for number in range(4):
        scheduler.add(make_request(f"b {number}", 20, 20, terms=ServiceTerms(tenant="b")), 0.0)
    scheduler.add(make_request("b", 20, 20, n=60, terms=ServiceTerms(tenant="b")), 0.0)
    for _ in range(80):
        plan = scheduler.plan(0.0)
        assert plan is not None
        for event in scheduler.commit(plan, result_of(plan), 0.02):
            tokens[event.request_id[0]] += len(event.token_ids)
        scheduler.check_invariants()
    assert tokens["a"] == pytest.approx(tokens["b"], rel=0.25), tokens


def test_a_sample_waits_for_its_first_token_from_when_it_joins_the_line() -> None:
    """Else its turn would count as a wait for which a TTFT target stretches steps, and be counted as missed."""
    pacing = TimedPacing(PacingTargets(max_num_tokens=2048, ttft_s=2.0), COSTS)
    scheduler = Scheduler(SchedulerLimits(256, 2048, 100_000), KVManager([20_000], 16), pacing=pacing)
    add_single(scheduler, 31)
    scheduler.add(make_request("eight", 20, 60, n=8), 0.0)
    now_s, longest_s = 0.0, 0.0
    for number in range(400):
        plan = scheduler.plan(now_s)
        assert plan is not None
        step_s = COSTS.seconds(StepWork(sum(plan.num_tokens), 0.0, sum(plan.is_sampled), 0.0))
        longest_s = max(longest_s, step_s if number > 10 else 0.0)
        now_s += step_s
        scheduler.commit(plan, result_of(plan), now_s)
    stats = scheduler.stats().pacing
    assert stats is not None and stats.num_first_tokens == stats.num_in_ttft == 39
    assert longest_s < 0.09


def test_samples_kept_back_fill_no_queue() -> None:
    targets = PacingTargets(max_num_tokens=2048)
    limits = SchedulerLimits(256, 2048, 100_000, QueueLimits(max_num_tokens=3000))
    scheduler = Scheduler(limits, KVManager([20_000], 16), pacing=TimedPacing(targets, COSTS))
    add_single(scheduler, 31)
    for _ in range(20):
        step(scheduler)
    scheduler.add(make_request("eight", 370, 500, n=8), 0.0)
    for _ in range(20):
        step(scheduler)
    assert scheduler.stats().num_waiting >= 5
    for name in ("x", "y", "z"):
        scheduler.add(make_request(name, 370, 5), 0.0)


def test_only_the_first_sample_of_a_tenant_makes_it_a_newcomer() -> None:
    policy = VirtualTokenCounters()
    first, second = (Sequence(number, make_request("a", 4, 4, n=2), number) for number in range(2))
    policy.push(first, 0.0)
    assert policy.pop() is first and policy.key(first)[0] == 0
    policy.on_finished(first)
    policy.push(second, 0.0)
    assert policy.key(second)[0] == 2


def test_places_that_were_scarce_a_while_ago_are_not_so_now() -> None:
    scheduler = scheduler_of(max_num_seqs=32)
    add_single(scheduler, 33)
    scheduler.add(make_request("other", 20, 500, terms=ServiceTerms(tenant="other")), 0.0)
    for _ in range(5):
        step(scheduler)
    scheduler.abort("other")
    for number in range(20, 33):
        scheduler.abort(f"single {number}")
    for _ in range(50):
        step(scheduler)
    scheduler.add(make_request("other", 20, 500, terms=ServiceTerms(tenant="other")), 0.0)
    scheduler.add(make_request("eight", 20, 500, n=8), 0.0)
    for _ in range(10):
        step(scheduler)
    assert num_running(scheduler, "eight") == 2


def test_within_one_account_turns_are_taken_where_places_are_scarce_too() -> None:
    scheduler = scheduler_of(max_num_seqs=40)
    add_single(scheduler, 31)
    scheduler.add(make_request("eight", 20, 500, n=8), 0.0)
    scheduler.add(make_request("many", 20, 500, n=32), 0.0)
    for _ in range(20):
        step(scheduler)
    for number in range(8):
        scheduler.add(make_request(f"burst {number}", 20, 3), 0.0)
    for _ in range(20):
        step(scheduler)
    assert scheduler.stats().num_running <= 35
    scheduler.add(make_request("late", 20, 3), 0.0)
    for _ in range(6):
        step(scheduler)
    assert not scheduler.is_open("late"), "it stands behind samples"


def test_background_that_lacks_memory_lets_no_sample_out_of_turn() -> None:
    pacing = TimedPacing(PacingTargets(max_num_tokens=2048), COSTS)
    scheduler = Scheduler(SchedulerLimits(128, 2048, 100_000), KVManager([400], 16), pacing=pacing)
    add_single(scheduler, 31, max_tokens=60)
    scheduler.add(make_request("other", 20, 60, terms=ServiceTerms(tenant="other")), 0.0)
    for number in range(40):
        terms = ServiceTerms(is_background=True)
        scheduler.add(make_request(f"background {number}", 600, 60, terms=terms), 0.0)
    scheduler.add(make_request("eight", 20, 60, n=8), 0.0)
    for _ in range(30):
        step(scheduler)
    assert num_running(scheduler, "eight") == 2
