"""The prefix cache in the scheduler: what is found, what is not, who waits for whom, and what is copied."""

from __future__ import annotations

import pytest

from ropeway.core.block_pool import BlockPool
from ropeway.core.deferral import MAX_NUM_DEFERRED
from ropeway.core.fair_service import VirtualTokenCounters
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.plan import BlockCopies, StepPlan, StepResult
from ropeway.core.policy import PriorityOrder
from ropeway.core.prefix_index import TokenHasher
from ropeway.core.scheduler import Scheduler
from ropeway.core.sequence import WaitingReason
from ropeway.core.waiting_line import WaitingLine
from support.scheduling import make_scheduler, run_step, sampled_ids

BLOCK = 4
PROMPT = tuple(range(1, 11))  # two full blocks and two tokens


def request(
    name: str,
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int = 2,
    *,
    n: int = 1,
    terms: ServiceTerms | None = None,
    skips_prefix_cache: bool = False,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, n=n),
        max_tokens=max_tokens,
        seed=0,
        terms=terms or ServiceTerms(),
        skips_prefix_cache=skips_prefix_cache,
    )


def cached(**options: object) -> Scheduler:
    return make_scheduler(block_size=BLOCK, has_prefix_cache=True, **options)  # type: ignore[arg-type]


def drain(scheduler: Scheduler) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(run_step(scheduler)[0])
        scheduler.check_invariants()
    return plans


def test_full_blocks_of_an_earlier_prompt_are_found_and_counted() -> None:
    scheduler = cached()
    scheduler.add(request("a"), 0.0)
    assert [plan.starts for plan in drain(scheduler)] == [(0,), (10,)]
    scheduler.add(request("b", (*PROMPT[:9], 99, 98, 97)), 0.0)
    plan, events = run_step(scheduler)
    assert (plan.starts, plan.num_tokens) == ((8,), (4,)) and plan.grants[0].block_ids[:2] == (0, 1)
    assert [event.num_cached_tokens for event in events] == [8]
    stats = scheduler.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits, stats.num_prompt_tokens) == (22, 8, 14)
    drain(scheduler)
    stats = scheduler.stats()
    assert stats.num_used_blocks == 0 and stats.num_cached_blocks == 3 and stats.num_evicted_blocks == 0


def test_an_answer_can_be_found_by_the_next_turn() -> None:
    scheduler = cached()
    scheduler.add(request("a", PROMPT, 7), 0.0)
    drain(scheduler)  # tokens 1: the cache holds the prompt and six of the seven
    scheduler.add(request("b", (*PROMPT, *[1] * 7, 5)), 0.0)
    assert run_step(scheduler)[0].starts == (16,)


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8, 9])
def test_a_prompt_that_is_entirely_cached_still_computes_one_token(num_prompt_tokens: int) -> None:
    scheduler = cached()
    prompt = PROMPT[:num_prompt_tokens]
    for number in range(3):
        scheduler.add(request(str(number), prompt), 0.0)
        plans = drain(scheduler)
        num_cached = num_prompt_tokens - 1 if num_prompt_tokens % BLOCK == 0 else num_prompt_tokens // BLOCK * BLOCK
        num_cached = min(num_cached, num_prompt_tokens - 1)
        assert plans[0].starts == (num_cached if number else 0,)
        assert not plans[0].copies, "nobody else held the last block"


def test_a_last_block_that_is_held_is_copied() -> None:
    scheduler = cached()
    scheduler.add(request("a", PROMPT[:8], 9), 0.0)
    run_step(scheduler)
    scheduler.add(request("b", PROMPT[:8]), 0.0)
    plan, _ = run_step(scheduler)
    assert plan.starts == (8, 7) and plan.num_tokens == (1, 1)
    assert plan.copies == (BlockCopies((1,), (3,)),) and plan.grants[0].block_ids == (2, 0, 3)
    drain(scheduler)


def test_the_sequences_of_a_request_share_its_prompt_and_copy_its_last_block() -> None:
    scheduler = cached()
    scheduler.add(request("a", n=3), 0.0)
    first, events = run_step(scheduler)
    assert (first.starts, first.num_tokens, events[0].num_cached_tokens) == ((0,), (10,), 0)
    second, events = run_step(scheduler)
    assert second.starts == (10, 9, 9) and second.num_tokens == (1, 1, 1)
    assert second.copies == (BlockCopies((2, 2), (3, 4)),)
    assert [event.num_cached_tokens for event in events] == [0, 9, 9]
    drain(scheduler)


def test_without_a_block_to_save_the_sequences_of_a_request_do_not_wait() -> None:
    scheduler = cached()
    scheduler.add(request("a", PROMPT[:3], n=3), 0.0)
    plan, _ = run_step(scheduler)
    assert plan.starts == (0, 0, 0) and not plan.copies


def test_two_equal_prompts_at_once_are_computed_once() -> None:
    scheduler = cached(budget=6)
    scheduler.add(request("a"), 0.0)
    (second,) = scheduler.add(request("b", PROMPT[:9]), 0.0)
    (third,) = scheduler.add(request("c", (50, 51)), 0.0)
    plan, _ = run_step(scheduler)
    assert plan.sequence_ids == (0, third.sequence_id), "it lets others pass"
    assert second.waiting_reason is WaitingReason.DEFERRED
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert second.sequence_id in plan.sequence_ids and plan.starts[plan.sequence_ids.index(second.sequence_id)] == 8
    drain(scheduler)
    assert scheduler.stats().num_prompt_tokens == 10 + 2 + 1


@pytest.mark.parametrize("end", ["abort", "stop", "fail"])
def test_who_waits_for_one_that_goes_goes_on(end: str) -> None:
    scheduler = cached(budget=6)
    scheduler.add(request("a"), 0.0)
    (second,) = scheduler.add(request("b"), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.sequence_ids == (0,)
    if end == "fail":
        scheduler.fail(plan, 0.0)
    else:
        scheduler.commit(plan, StepResult(plan.step_id, (), ()), 0.0)
        events = scheduler.abort("a") if end == "abort" else scheduler.stop("a", 0)
        assert len(events) == 1
    plan, _ = run_step(scheduler)
    assert plan.sequence_ids == (second.sequence_id,) and plan.starts == (0 if end == "fail" else 4,)
    drain(scheduler)


def test_who_waits_can_be_aborted() -> None:
    scheduler = cached(budget=6)
    scheduler.add(request("a"), 0.0)
    scheduler.add(request("b"), 0.0)
    run_step(scheduler)
    assert scheduler.stats().num_waiting == 1
    assert [event.finish_reason for event in scheduler.abort("b")] == ["abort"]
    scheduler.check_invariants()
    assert scheduler.stats().num_waiting == 0
    drain(scheduler)


def test_only_so_many_let_others_pass() -> None:
    scheduler = cached(budget=6, max_num_seqs=6, num_blocks=4 * MAX_NUM_DEFERRED)
    for number in range(MAX_NUM_DEFERRED + 3):
        scheduler.add(request(str(number)), 0.0)
    scheduler.add(request("other", (90, 91)), 0.0)
    run_step(scheduler)
    assert len(scheduler._line._deferred) == MAX_NUM_DEFERRED
    scheduler.check_invariants()
    drain(scheduler)
    assert scheduler.stats().num_finished["length"] == MAX_NUM_DEFERRED + 4


def test_a_tenant_whose_prompts_begin_alike_goes_before_others_no_longer_than_its_service_says() -> None:
    scheduler = cached(line=WaitingLine(VirtualTokenCounters), max_num_seqs=4, num_blocks=200)
    for number in range(9):
        scheduler.add(request(str(number), max_tokens=30, terms=ServiceTerms(tenant="flood")), 0.0)
    assert [len(run_step(scheduler)[0].sequence_ids) for _ in range(2)] == [1, 4], "one computes what all share"
    (other,) = scheduler.add(request("other", (50, 51), terms=ServiceTerms(tenant="other")), 0.0)
    plan, _ = run_step(scheduler)
    assert other.sequence_id in plan.sequence_ids and len(plan.preempted_ids) == 1
    scheduler.check_invariants()
    drain(scheduler)


def test_one_that_let_others_pass_does_not_hide_a_higher_priority() -> None:
    scheduler = cached(line=WaitingLine(lambda: PriorityOrder(0.0)), max_num_seqs=2)
    low = ServiceTerms(priority=10)
    for name, prompt in (("a", PROMPT), ("b", PROMPT), ("c", (50, 51))):
        scheduler.add(request(name, prompt, 9, terms=low), 0.0)
    assert run_step(scheduler)[0].sequence_ids == (0, 2), "b lets c pass"
    run_step(scheduler)
    (high,) = scheduler.add(request("high", (60, 61), terms=ServiceTerms(priority=-10)), 0.0)
    plan, _ = run_step(scheduler)
    assert high.sequence_id in plan.sequence_ids and plan.preempted_ids == (2,)
    scheduler.check_invariants()
    drain(scheduler)


def by_priority(**prompts: tuple[int, tuple[int, ...]]) -> Scheduler:
    """Requests of these (priority, prompt)s, which run; prompts that begin alike share blocks."""
    scheduler = cached(line=WaitingLine(lambda: PriorityOrder(0.0)), num_blocks=20, budget=128)
    for name, (priority, prompt) in prompts.items():
        scheduler.add(request(name, prompt, 9, terms=ServiceTerms(priority=priority)), 0.0)
    while scheduler.stats().num_running < len(prompts):
        run_step(scheduler)
    return scheduler


def test_nobody_is_preempted_for_blocks_that_the_newcomer_shares() -> None:
    shared = tuple(range(100, 144))
    scheduler = by_priority(first=(0, tuple(range(22))), last=(9, (*shared, *range(6))))
    assert scheduler.stats().num_free_blocks == 1
    # It takes 5 blocks beside the 11 that are held, and 16 where nobody holds them.
    scheduler.add(request("new", (*shared, *range(50, 70)), terms=ServiceTerms(priority=5)), 0.0)
    plan, _ = run_step(scheduler)
    assert plan.sequence_ids == (0, 1) and not plan.preempted_ids, "preempted in vain"
    drain(scheduler)


def test_blocks_that_several_hold_are_free_once_all_of_them_are_preempted() -> None:
    shared = tuple(range(100, 132))
    last = {f"last {number}": (9, (*shared, *range(10 * number, 10 * number + 6))) for number in range(2)}
    scheduler = by_priority(first=(0, tuple(range(22))), **last)
    assert scheduler.stats().num_free_blocks == 2, "8 of 10 are shared"
    scheduler.add(request("new", tuple(range(200, 246)), terms=ServiceTerms(priority=5)), 0.0)
    plan, _ = run_step(scheduler)
    assert plan.preempted_ids == (2, 1) and plan.sequence_ids == (0, 3)
    drain(scheduler)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ServiceTerms(), ServiceTerms(tenant="a")),
        (ServiceTerms(tenant="a"), ServiceTerms(tenant="b")),
        (ServiceTerms(), ServiceTerms(cache_salt="s")),
        (ServiceTerms(tenant="ab", cache_salt="c"), ServiceTerms(tenant="a", cache_salt="bc")),
        (ServiceTerms(tenant="a"), ServiceTerms(cache_salt="a")),
    ],
)
def test_tenants_and_salts_share_nothing(one: ServiceTerms, other: ServiceTerms) -> None:
    scheduler = cached(budget=6)
    scheduler.add(request("a", terms=one), 0.0)
    drain(scheduler)
    scheduler.add(request("b", terms=other), 0.0)
    scheduler.add(request("c", terms=one), 0.0)
    plans = drain(scheduler)
    assert plans[0].starts[plans[0].sequence_ids.index(1)] == 0
    assert scheduler.stats().num_prefix_hits == 8, "only c finds what a has computed"
    hasher = TokenHasher(BLOCK)
    first, second = (hasher.prompt_hashes(request("x", terms=terms)) for terms in (one, other))
    assert len(first) == len(second) == 2 and not set(first) & set(second)


def test_users_of_a_tenant_share() -> None:
    scheduler = cached()
    for user in ("x", "y"):
        scheduler.add(request(user, terms=ServiceTerms(tenant="a", user=user)), 0.0)
        drain(scheduler)
    assert scheduler.stats().num_prefix_hits == 8


def test_hashes_are_chained() -> None:
    hasher = TokenHasher(BLOCK)
    whole = hasher.prompt_hashes(request("a", PROMPT[:8]))
    assert whole == hasher.prompt_hashes(request("b"))[:2]
    swapped = hasher.prompt_hashes(request("c", PROMPT[4:8] + PROMPT[:4]))
    assert not set(whole) & set(swapped), "the same tokens at another place are another block"
    assert hasher.next_hash(request("a"), None, PROMPT[:4]) == whole[0]
    assert hasher.next_hash(request("a"), whole[0], PROMPT[4:8]) == whole[1]
    assert hasher.prompt_hashes(request("d", PROMPT[:3])) == []


def test_a_request_may_skip_what_is_cached_and_is_found_by_others() -> None:
    scheduler = cached(budget=6)
    for name in ("a", "b"):
        scheduler.add(request(name, skips_prefix_cache=True), 0.0)
    plan, _ = run_step(scheduler)
    assert plan.starts == (0, 0), "neither waits for the other"
    drain(scheduler)
    scheduler.add(request("c", skips_prefix_cache=True, n=2), 0.0)
    assert {start for plan in drain(scheduler)[:1] for start in plan.starts} == {0}
    assert scheduler.stats().num_prefix_hits == 0
    scheduler.add(request("d"), 0.0)
    assert run_step(scheduler)[0].starts == (8,)


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    scheduler = cached(num_blocks=6, max_model_len=24)
    (a,) = scheduler.add(request("a", tuple(range(30, 39)), 12), 0.0)
    (b,) = scheduler.add(request("b", tuple(range(50, 59)), 12), 0.0)
    plans = drain(scheduler)
    assert a.num_preemptions == 0 and b.num_preemptions > 0
    resumed = [plan for plan in plans if b.sequence_id in plan.sequence_ids and len(plan.sequence_ids) > 1]
    assert resumed
    stats = scheduler.stats()
    assert stats.num_recomputed_tokens < 9 * b.num_preemptions, "some of it was found again"
    assert stats.num_prefix_hits == 0 and stats.num_prompt_tokens == 18, "which is no hit of a prompt"


def test_what_a_failed_step_computed_is_not_shared() -> None:
    scheduler = cached()
    scheduler.add(request("a"), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.fail(plan, 0.0)
    scheduler.check_invariants()
    assert scheduler.stats().num_cached_blocks == 0
    scheduler.add(request("b"), 0.0)
    assert run_step(scheduler)[0].starts == (0,)


def test_what_a_failed_row_computed_is_not_shared() -> None:
    scheduler = cached()
    scheduler.add(request("a"), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.commit(plan, StepResult(plan.step_id, (), (), sampled_ids(plan)), 0.0)
    assert scheduler.stats().num_cached_blocks == 0 and not scheduler.has_work


def test_what_was_aborted_in_flight_is_not_shared() -> None:
    scheduler = cached()
    scheduler.add(request("a"), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.abort("a")
    scheduler.commit(plan, StepResult(plan.step_id, sampled_ids(plan), (1,)), 0.0)
    scheduler.check_invariants()
    assert scheduler.stats().num_cached_blocks == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    scheduler = cached(num_blocks=4)
    scheduler.add(request("a", PROMPT[:9], 1), 0.0)
    drain(scheduler)
    assert scheduler.stats().num_cached_blocks == 2
    scheduler.add(request("b", tuple(range(70, 79)), 1), 0.0)  # takes two blank blocks and evicts one
    drain(scheduler)
    assert scheduler.stats().num_evicted_blocks == 1
    scheduler.add(request("c", PROMPT[:9], 1), 0.0)
    assert run_step(scheduler)[0].starts == (4,)


def test_an_unheld_block_makes_room_for_an_equal_one_that_is_held() -> None:
    pool = BlockPool(3)
    old, new = pool.take(2)
    pool.publish(old, b"x")
    pool.publish(new, b"x")  # the other is held: it stays
    assert pool.index.get(b"x") == old
    pool.give_back([old])
    pool.publish(new, b"x")
    assert pool.index.get(b"x") == new and pool.num_free_blocks == 2 and pool.index.num_parked == 0
    pool.check_invariants([new])


def test_the_invariant_checker_sees_what_is_shared_wrongly() -> None:
    def running() -> Scheduler:
        scheduler = cached()
        scheduler.add(request("a", max_tokens=9), 0.0)
        run_step(scheduler)
        return scheduler

    scheduler = running()
    scheduler._kv._pools[0].index.insert(b"x", 2)
    with pytest.raises(AssertionError, match="may write to block 2, which is shared"):
        scheduler.check_invariants()
    scheduler = running()
    next(iter(scheduler._roster.running.values())).num_published_blocks = 3
    with pytest.raises(AssertionError, match="offers what is not computed"):
        scheduler.check_invariants()
    scheduler = running()
    scheduler._kv._pools[0].index._block_of[b"y"] = 1
    with pytest.raises(AssertionError, match="hashes and blocks differ"):
        scheduler.check_invariants()
