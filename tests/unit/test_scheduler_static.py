"""Static batching: the baseline forms, holds and ends its batches as it says, and is not crippled."""

from __future__ import annotations

import pytest

from ropeway.core.batching import Batching, ContinuousBatching, StaticBatching
from ropeway.core.scheduler import Scheduler
from support.scheduling import STOP_TOKEN_ID, make_request, make_scheduler, result_of, run_step


def run(scheduler: Scheduler) -> int:
    """Run until nothing is left; the number of steps."""
    num_steps = 0
    while scheduler.has_work:
        run_step(scheduler)
        scheduler.check_invariants()
        num_steps += 1
    return num_steps


def test_arrivals_wait_until_the_longest_member_ends() -> None:
    scheduler = make_scheduler(batching=StaticBatching())
    scheduler.add(make_request("short", 2, 1), 0.0)
    scheduler.add(make_request("long", 2, 3), 0.0)
    assert run_step(scheduler)[0].sequence_ids == (0, 1)
    scheduler.add(make_request("late", 2, 3), 0.0)
    assert run_step(scheduler)[0].sequence_ids == (1,)
    assert run_step(scheduler)[0].sequence_ids == (1,)
    plan, _ = run_step(scheduler)
    assert plan.sequence_ids == (2,) and plan.finished_ids == (0, 1)


def test_a_batch_boards_as_a_whole_and_its_prefill_is_chunked_by_the_budget() -> None:
    scheduler = make_scheduler(budget=4, batching=StaticBatching())
    for name in "abc":
        scheduler.add(make_request(name, 6, 2), 0.0)
    plans = [run_step(scheduler)[0] for _ in range(5)]
    assert [p.sequence_ids for p in plans] == [(0, 1), (0,), (0, 1, 2), (1, 2), (1, 2)]
    assert [p.num_tokens for p in plans] == [(2, 2), (4,), (1, 2, 1), (2, 2), (1, 3)]
    assert [p.grants[0].block_ids for p in plans] == [(0, 1, 2, 3), (), (4, 5), (), ()]


def test_a_batch_is_no_larger_than_the_budget() -> None:
    scheduler = make_scheduler(max_num_seqs=8, budget=3, batching=StaticBatching(is_padded=True))
    for i in range(8):
        scheduler.add(make_request(str(i), 1, 2 + i), 0.0)
    assert run_step(scheduler)[0].sequence_ids == (0, 1, 2) and scheduler.stats().num_running == 3
    run(scheduler)


def test_each_member_reserves_prompt_and_max_tokens() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, batching=StaticBatching())
    for name in "abc":
        scheduler.add(make_request(name, 2, 10), 0.0)  # 3 blocks each
    plan, _ = run_step(scheduler)
    assert plan.sequence_ids == (0, 1) and scheduler.stats().num_used_blocks == 6
    assert len(plan.grants[0].block_ids) == 6
    run(scheduler)
    assert scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_finished_member_keeps_memory_and_place(is_padded: bool) -> None:
    scheduler = make_scheduler(batching=StaticBatching(is_padded=is_padded))
    scheduler.add(make_request("short", 2, 1), 0.0)
    scheduler.add(make_request("long", 2, 3), 0.0)
    _, events = run_step(scheduler)
    used = scheduler.stats().num_used_blocks
    assert events[0].finish_reason == "length" and used == 3
    plan, events = run_step(scheduler)
    assert plan.sequence_ids == ((1, 0) if is_padded else (1,)) and not plan.finished_ids
    assert [e.request_id for e in events] == ["long"] and scheduler.stats().num_used_blocks == used
    scheduler.check_invariants()
    run_step(scheduler)
    assert scheduler.stats().num_used_blocks == 0
    assert scheduler.stats().num_padding_tokens == (2 if is_padded else 0)


def test_padding_computes_the_last_position_again() -> None:
    scheduler = make_scheduler(batching=StaticBatching(is_padded=True))
    scheduler.add(make_request("a", 3, 5), 0.0)
    scheduler.add(make_request("b", 2, 5), 0.0)
    run_step(scheduler)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.stop("a", 0)  # while its position 3 is being computed
    scheduler.commit(plan, result_of(plan), 0.0)
    plan, events = run_step(scheduler, STOP_TOKEN_ID)
    assert (plan.sequence_ids, plan.starts, plan.num_tokens) == ((1, 0), (3, 3), (1, 1))
    assert plan.is_sampled == (True, True)
    assert [(e.request_id, e.finish_reason) for e in events] == [("b", "stop")]


def test_a_cancelled_member_frees_its_memory_at_once_and_its_place_stays_empty() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4, batching=StaticBatching(is_padded=True))
    for name in "abc":
        scheduler.add(make_request(name, 2, 2), 0.0)
    run_step(scheduler)
    scheduler.abort("a")
    assert scheduler.stats().num_free_blocks == 1
    plan, _ = run_step(scheduler)
    assert plan.sequence_ids == (1,) and plan.finished_ids == (0,)


def test_a_member_stopped_before_its_first_token_is_not_padding() -> None:
    scheduler = make_scheduler(budget=2, batching=StaticBatching(is_padded=True))
    for name in "ab":
        scheduler.add(make_request(name, 2, 2), 0.0)
    run_step(scheduler)
    scheduler.stop("b", 0)
    assert run_step(scheduler)[0].sequence_ids == (0,)


def test_a_failed_step_ends_the_batch() -> None:
    scheduler = make_scheduler(batching=StaticBatching(is_padded=True))
    scheduler.add(make_request("a", 2, 1), 0.0)
    scheduler.add(make_request("b", 2, 3), 0.0)
    run_step(scheduler)
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.sequence_ids == (1, 0)
    assert [(e.request_id, e.finish_reason) for e in scheduler.fail(plan, 0.0)] == [("b", "error")]
    assert scheduler.stats().num_used_blocks == 0 and not scheduler.has_work


@pytest.mark.parametrize("batching", [StaticBatching(), StaticBatching(is_padded=True)])
def test_equal_lengths_take_as_many_steps_as_continuous_batching(batching: Batching) -> None:
    num_steps = []
    for b in (batching, ContinuousBatching()):
        scheduler = make_scheduler(num_blocks=100, max_num_seqs=8, budget=64, batching=b)
        for i in range(32):
            scheduler.add(make_request(str(i), 8, 20), 0.0)
        num_steps.append(run(scheduler))
    assert num_steps == [4 * 20, 4 * 20]


def test_ragged_lengths_cost_the_static_batch_steps() -> None:
    num_steps = []
    for batching in (StaticBatching(), ContinuousBatching()):
        scheduler = make_scheduler(num_blocks=200, max_num_seqs=8, budget=64, batching=batching)
        for i in range(32):
            scheduler.add(make_request(str(i), 8, 5 + 35 * (i % 4 == 0)), 0.0)
        num_steps.append(run(scheduler))
    assert num_steps[0] == 4 * 40 and num_steps[1] < 0.6 * num_steps[0]
