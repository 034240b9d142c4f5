"""Who comes first under each policy, who makes way for whom, and what background work is sure of."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from ropeway.core.admission import ReserveAdmission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.fair_service import NUM_REMEMBERED_USERS, VirtualTokenCounters
from ropeway.core.params import ServiceTerms
from ropeway.core.plan import StepPlan
from ropeway.core.policy import FirstComeFirstServed, Policy, PriorityOrder, ShortestPrefillFirst
from ropeway.core.scheduler import Scheduler
from ropeway.core.sequence import Sequence, SequenceState, WaitingReason
from ropeway.core.waiting_line import WaitingLine
from ropeway.errors import ConfigError, InvalidRequestError
from support.scheduling import make_request, make_scheduler, run_step


def add(
    scheduler: Scheduler, name: str, num_prompt_tokens: int, max_tokens: int, now_s: float = 0.0, **terms: object
) -> int:
    """Adds a request on terms; its sequence id."""
    request = make_request(name, num_prompt_tokens, max_tokens, terms=ServiceTerms(**terms))  # type: ignore[arg-type]
    return scheduler.add(request, now_s)[0].sequence_id


def order_of_boarding(scheduler: Scheduler, num_steps: int = 200) -> list[str]:
    """Runs until nothing is left; requests in the order of their first step."""
    started = []
    for _ in range(num_steps):
        if not scheduler.has_work:
            return started
        run_step(scheduler)
        scheduler.check_invariants()
        started += scheduler.take_started_ids()
    raise AssertionError("it does not end")


def with_policy(make_policy: Callable[[], Policy], **options: object) -> Scheduler:
    return make_scheduler(line=WaitingLine(make_policy), **options)  # type: ignore[arg-type]


# -- priority ----------------------------------------------------------------------------------------------------------


def test_lower_priorities_board_first_and_equal_ones_in_order_of_arrival() -> None:
    scheduler = with_policy(lambda: PriorityOrder(60.0), max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 1), ("e", -1)):
        add(scheduler, name, 2, 1, priority=priority)
    assert order_of_boarding(scheduler) == ["c", "e", "a", "b", "d"]


def test_waiting_outweighs_priority_after_the_ageing_time() -> None:
    scheduler = with_policy(lambda: PriorityOrder(60.0), max_num_seqs=1)
    add(scheduler, "low", 2, 1, now_s=0.0, priority=2)
    add(scheduler, "just in time", 2, 1, now_s=119.0, priority=0)
    add(scheduler, "too late", 2, 1, now_s=121.0, priority=0)
    assert order_of_boarding(scheduler) == ["just in time", "low", "too late"]


def test_strict_priorities_never_age() -> None:
    scheduler = with_policy(lambda: PriorityOrder(0.0), max_num_seqs=1)
    add(scheduler, "low", 2, 1, now_s=0.0, priority=2)
    add(scheduler, "high", 2, 1, now_s=1e9, priority=1)
    assert order_of_boarding(scheduler) == ["high", "low"]


def test_a_higher_priority_takes_the_place_of_the_lowest_on_a_full_batch() -> None:
    scheduler = with_policy(lambda: PriorityOrder(60.0), max_num_seqs=2, num_blocks=64)
    lowest = add(scheduler, "lowest", 2, 9, priority=5)
    low = add(scheduler, "low", 2, 9, priority=4)
    run_step(scheduler)
    high = add(scheduler, "high", 2, 9, priority=1)
    equal = add(scheduler, "equal", 2, 9, priority=4)
    plan, _ = run_step(scheduler)
    assert plan.preempted_ids == (lowest,) and set(plan.sequence_ids) == {low, high}
    plan, _ = run_step(scheduler)
    assert not plan.preempted_ids and equal not in plan.sequence_ids, "an equal priority takes nobody's place"
    scheduler.check_invariants()


def test_a_higher_priority_takes_memory_only_where_it_then_fits() -> None:
    scheduler = with_policy(lambda: PriorityOrder(60.0), num_blocks=8, block_size=2)
    top = add(scheduler, "top", 8, 4, priority=0)
    low = add(scheduler, "low", 4, 2, priority=9)
    run_step(scheduler)
    large = scheduler.add(make_request("large", 12, 2, terms=ServiceTerms(priority=1)), 0.0)[0]
    plan, _ = run_step(scheduler)
    assert not plan.preempted_ids and set(plan.sequence_ids) == {top, low}, "preempted in vain"
    assert large.waiting_reason is WaitingReason.CAPACITY
    scheduler.abort("large")
    small = add(scheduler, "small", 4, 2, priority=1)
    plan, _ = run_step(scheduler)
    assert small in plan.sequence_ids or plan.preempted_ids == ()


def test_a_prefill_of_higher_priority_goes_before_those_in_flight() -> None:
    scheduler = with_policy(lambda: PriorityOrder(60.0), budget=8)
    add(scheduler, "long", 40, 2, priority=3)
    run_step(scheduler)
    high = add(scheduler, "high", 8, 2, priority=0)
    plan, events = run_step(scheduler)
    assert plan.sequence_ids[0] == high and plan.num_tokens == (8,)
    assert [e.request_id for e in events] == ["high"]


def test_priorities_out_of_range_are_refused() -> None:
    for priority in (1001, -1001, 1.5, True):
        with pytest.raises(InvalidRequestError, match="priority"):
            ServiceTerms(priority=priority)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="priority_aging_s"):
        PriorityOrder(-1.0)


# -- shortest prefill first --------------------------------------------------------------------------------------------


def test_shorter_prompts_board_first_but_nobody_waits_beyond_the_bound() -> None:
    scheduler = with_policy(ShortestPrefillFirst, max_num_seqs=1, num_blocks=4000, max_model_len=20_000)
    add(scheduler, "long", 12_000, 1, now_s=0.0)
    add(scheduler, "short", 10, 1, now_s=1.0)
    add(scheduler, "shorter", 5, 1, now_s=1.0)
    add(scheduler, "within the bound", 5, 1, now_s=59.0)
    add(scheduler, "beyond the bound", 5, 1, now_s=60.1)
    assert order_of_boarding(scheduler, 1000) == ["shorter", "short", "within the bound", "long", "beyond the bound"]


# -- fair service ------------------------------------------------------------------------------------------------------


def test_with_one_tenant_fair_service_is_first_come_first_served() -> None:
    rng = random.Random(3)
    for _ in range(30):
        options = {"num_blocks": rng.randint(8, 20), "block_size": 2, "budget": rng.randint(3, 9), "max_num_seqs": 4}
        a, b = (with_policy(make, **options) for make in (VirtualTokenCounters, FirstComeFirstServed))
        number = 0
        for _ in range(60):
            if rng.random() < 0.4:
                shape = (rng.randint(1, 8), rng.randint(1, 8))
                for scheduler in (a, b):
                    scheduler.add(make_request(str(number), *shape, n=1 + number % 2), 0.0)
                number += 1
            if a.has_work:
                assert run_step(a) == run_step(b)
        assert a.stats() == b.stats()


def test_the_tenant_served_least_boards_next() -> None:
    scheduler = with_policy(VirtualTokenCounters, max_num_seqs=1)
    for i in range(3):
        add(scheduler, f"a{i}", 8, 4, tenant="a")
    for i in range(3):
        add(scheduler, f"b{i}", 8, 4, tenant="b")
    assert order_of_boarding(scheduler) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_tenant_of_twice_the_weight_is_served_twice_as_much() -> None:
    scheduler = with_policy(VirtualTokenCounters, max_num_seqs=1)
    for i in range(60):
        for tenant, weight in (("a", 2.0), ("b", 1.0)):
            add(scheduler, f"{tenant}{i}", 8, 4, tenant=tenant, weight=weight)
    started = order_of_boarding(scheduler, 1000)[:30]
    assert Counter(name[0] for name in started) == {"a": 20, "b": 10}
    with pytest.raises(InvalidRequestError, match="weight must be above 0"):
        ServiceTerms(tenant="a", weight=0.0)


def test_a_weight_can_change_while_a_tenant_waits() -> None:
    scheduler = with_policy(VirtualTokenCounters, max_num_seqs=1)
    for i in range(60):
        for tenant in "ab":
            add(scheduler, f"{tenant}{i}", 8, 4, tenant=tenant)
    add(scheduler, "a last", 8, 4, tenant="a", weight=2.0)
    started = order_of_boarding(scheduler, 1000)[:30]
    assert Counter(name[0] for name in started) == {"a": 20, "b": 10}


def test_idling_earns_no_credit() -> None:
    scheduler = with_policy(VirtualTokenCounters, max_num_seqs=1)
    for i in range(40):
        add(scheduler, f"a{i}", 8, 4, tenant="a")
    for _ in range(100):
        run_step(scheduler)
    for i in range(10):
        add(scheduler, f"b{i}", 8, 4, tenant="b")
    scheduler.take_started_ids()
    started = order_of_boarding(scheduler, 1000)[:8]
    assert Counter(name[0] for name in started) == {"a": 4, "b": 4}


def test_users_divide_the_share_of_their_tenant_only() -> None:
    scheduler = with_policy(VirtualTokenCounters, max_num_seqs=1)
    for i in range(40):
        add(scheduler, f"b{i}", 8, 4, tenant="b")
        add(scheduler, f"x{i}", 8, 4, tenant="a", user="x")
        add(scheduler, f"y{i}", 8, 4, tenant="a", user="y")
        add(scheduler, f"z{i}", 8, 4, tenant="a", user="y")
    counts = Counter(name[0] for name in order_of_boarding(scheduler, 2000)[:40])
    assert counts["b"] == 20 and counts["x"] == 10 and counts["y"] + counts["z"] == 10


def test_a_hundred_thousand_users_gain_no_service_and_take_no_lasting_memory() -> None:
    policy = VirtualTokenCounters()
    request = make_request("any", 2, 1)
    served: Counter[str] = Counter()

    def push(number: int, tenant: str) -> None:
        terms = ServiceTerms(tenant=tenant, user=f"user {number}" if tenant == "a" else "the same")
        policy.push(Sequence(number, replace(request, terms=terms), 0), 0.0)

    for number, tenant in enumerate("aabb"):
        push(number, tenant)
    for number in range(4, 200_000):
        sequence = policy.pop()
        policy.on_boarded(sequence)
        sequence.num_computed_tokens = sequence.num_tokens
        tenant = sequence.request.terms.tenant
        served[tenant] += 1
        push(number, tenant)
        policy.on_finished(sequence)
    assert served["a"] >= 99_000 and abs(served["a"] - served["b"]) <= 2
    ledger = policy._tenants._accounts["a"].users
    assert len(ledger._remembered) == NUM_REMEMBERED_USERS and len(ledger._accounts) <= 4 and len(ledger._heap) <= 32
    assert len(policy._seats) <= 4


def test_a_newcomer_takes_the_place_of_the_most_served_tenants_newest() -> None:
    scheduler = with_policy(VirtualTokenCounters, max_num_seqs=2, budget=64, num_blocks=64)
    ids = [add(scheduler, f"flood {i}", 8, 20, tenant="flood") for i in range(6)]
    for _ in range(3):
        run_step(scheduler)
    newcomer = add(scheduler, "new", 8, 4, tenant="new")
    second = add(scheduler, "new, too", 8, 4, tenant="new")
    plan, _ = run_step(scheduler)
    assert plan.preempted_ids == (ids[1],) and set(plan.sequence_ids) == {ids[0], newcomer}
    plans = [run_step(scheduler)[0] for _ in range(2)]
    assert not any(p.preempted_ids or second in p.sequence_ids for p in plans), "only the first of its tenant does"


def test_a_newcomers_prefill_goes_before_those_in_flight() -> None:
    scheduler = with_policy(VirtualTokenCounters, budget=8, num_blocks=200)
    for i in range(4):
        add(scheduler, f"flood {i}", 100 if i else 2, 4, tenant="flood")
    run_step(scheduler)
    newcomer = add(scheduler, "new", 6, 4, tenant="new")
    plan, _ = run_step(scheduler)
    assert plan.sequence_ids[:2] == (0, newcomer) and plan.num_tokens[:2] == (1, 6)


def test_what_is_computed_again_is_not_charged_and_what_is_not_computed_is_given_back() -> None:
    scheduler = with_policy(VirtualTokenCounters, num_blocks=4, block_size=2, budget=4)
    policy = scheduler._line._interactive
    assert isinstance(policy, VirtualTokenCounters)
    add(scheduler, "a", 2, 6, tenant="a")
    add(scheduler, "b", 2, 6, tenant="b")
    counters = {name: account for name, account in policy._tenants._accounts.items()}
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.stats().num_recomputed_tokens > 0
    # 2 prompt tokens, and 5 computed answer tokens (the 6th is never computed); b's one that was in the prefill after
    # the preemption counts as a prompt's
    assert counters["a"].counter == 2 + 2 * 5 and counters["b"].counter in (2 + 2 * 5, 2 + 2 * 4 + 1)
    add(scheduler, "c", 6, 2, tenant="c")
    run_step(scheduler)  # 4 of 6 tokens
    account = policy._tenants._accounts["c"]
    before = account.counter
    scheduler.abort("c")
    assert account.counter == before - 2


# -- background --------------------------------------------------------------------------------------------------------


def test_background_boards_only_where_nobody_else_waits_and_makes_way() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    batch = [add(scheduler, f"batch {i}", 2, 30, is_background=True) for i in range(2)]
    run_step(scheduler)
    person = add(scheduler, "person", 2, 3)
    plan, _ = run_step(scheduler)
    assert plan.preempted_ids == (batch[1],) and set(plan.sequence_ids) == {batch[0], person}
    scheduler.check_invariants()


def test_background_is_preempted_first_for_memory() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    batch = add(scheduler, "batch", 2, 6, is_background=True)
    add(scheduler, "person", 2, 6)
    plans = [run_step(scheduler)[0] for _ in range(4)]
    assert [p.preempted_ids for p in plans] == [(), (), (), (batch,)]


def _tokens(plan: StepPlan, ids: set[int]) -> int:
    return sum(n for i, n in zip(plan.sequence_ids, plan.num_tokens, strict=True) if i in ids)


@pytest.mark.parametrize("make_policy", [VirtualTokenCounters, FirstComeFirstServed, ShortestPrefillFirst])
def test_background_has_its_share_under_a_flood(make_policy: Callable[[], Policy]) -> None:
    line = WaitingLine(make_policy, background_share=0.2)
    scheduler = make_scheduler(line=line, max_num_seqs=4, budget=64, num_blocks=64)
    background = {add(scheduler, f"batch {i}", 30, 20, is_background=True) for i in range(40)}
    num_background = num_tokens = number = 0
    for _ in range(1500):
        while scheduler.stats().num_waiting + scheduler.stats().num_preempted < 60:
            add(scheduler, f"person {number}", 30, 20)
            number += 1
        recomputed = scheduler.stats().num_recomputed_tokens
        plan, _ = run_step(scheduler)
        num_tokens += plan.total_num_tokens - (scheduler.stats().num_recomputed_tokens - recomputed)
        num_background += _tokens(plan, background)
        if len([s for s in scheduler._roster.sequences.values() if s.sequence_id in background]) < 4:
            break
    num_background -= scheduler.stats().num_recomputed_tokens  # at most: whoever lost them
    assert num_background >= 0.2 * num_tokens - 2 * 256, (num_background, num_tokens)


def test_without_a_share_background_waits_as_long_as_anybody_else_does() -> None:
    scheduler = make_scheduler(line=WaitingLine(background_share=0.0), max_num_seqs=2)
    batch = scheduler.add(make_request("batch", 2, 2, terms=ServiceTerms(is_background=True)), 0.0)[0]
    for i in range(300):
        add(scheduler, str(i), 2, 4)
        run_step(scheduler)
    assert batch.state is SequenceState.PREEMPTED and batch.num_generated_tokens <= 1
    for share in (-0.1, 0.95):
        with pytest.raises(ConfigError, match="background_share"):
            WaitingLine(background_share=share)


@pytest.mark.parametrize(("num_prompt_tokens", "counts"), [(12, [(7, 0), (5, 2)]), (17, [(4, 3), (7, 0), (6, 1)])])
def test_a_newcomers_prompt_is_halved_only_beyond_two_steps(
    num_prompt_tokens: int, counts: list[tuple[int, int]]
) -> None:
    """Halved, 12 tokens took three steps of 7: TTFT p99 beside a flood was 0.53 s in place of 0.41."""
    scheduler = with_policy(VirtualTokenCounters, budget=8, num_blocks=200)
    add(scheduler, "decoding", 2, 9, tenant="flood")
    flood = add(scheduler, "flood", 60, 4, tenant="flood")
    run_step(scheduler)
    newcomer = add(scheduler, "new", num_prompt_tokens, 4, tenant="new")
    for expected in counts:
        plan, _ = run_step(scheduler)
        rows = dict(zip(plan.sequence_ids, plan.num_tokens, strict=True))
        assert (rows[newcomer], rows.get(flood, 0)) == expected


def test_a_lone_tenants_first_prompt_is_halved_as_under_fcfs() -> None:
    scheduler = with_policy(VirtualTokenCounters, budget=8, num_blocks=100)
    add(scheduler, "first", 12, 4)
    add(scheduler, "second", 12, 4)
    assert run_step(scheduler)[0].num_tokens == (4, 4)


def test_reserving_admission_and_a_newcomer() -> None:
    batching = ContinuousBatching(ReserveAdmission())
    scheduler = make_scheduler(
        line=WaitingLine(VirtualTokenCounters), batching=batching, num_blocks=8, block_size=4, max_num_seqs=8
    )
    for i in range(4):
        add(scheduler, f"flood {i}", 8, 8, tenant="flood")
    run_step(scheduler)
    newcomer = add(scheduler, "new", 8, 8, tenant="new")
    plan, _ = run_step(scheduler)
    assert newcomer in plan.sequence_ids and plan.preempted_ids == (1,)
    order_of_boarding(scheduler)


def test_a_newcomer_boards_in_the_plan_that_makes_way_for_it() -> None:
    # although its victim's tenant, which is given back what it did not compute, is then the one served least
    scheduler = with_policy(VirtualTokenCounters, max_num_seqs=1, budget=4, num_blocks=8, block_size=1)
    add(scheduler, "first", 1, 1, tenant="c")
    victim = add(scheduler, "long", 6, 1, tenant="c")
    run_step(scheduler)
    run_step(scheduler)  # 4 of 6
    newcomer = add(scheduler, "new", 4, 2, tenant="a")
    plan, _ = run_step(scheduler)
    assert plan.preempted_ids == (victim,) and plan.sequence_ids == (newcomer,)
    scheduler.check_invariants()
