"""Steps held for clients that answer an end with their next request."""

from __future__ import annotations

import threading
import time

import pytest

from ropeway.engine.engine_thread import EngineThread, StepNews
from ropeway.engine.follow_ups import LEAST_IN_TIME, MAX_HOLD_S, NUM_LET_PASS, FollowUps
from support.gated_engine import GatedBackend, engine_on, request


def hold_s(follow_ups: FollowUps, num_ended: int = 1, step_s: float = 0.02, now_s: float = 5.0) -> float:
    follow_ups.on_step(num_ended, step_s, now_s)
    return follow_ups.left_s(now_s)


def test_a_step_is_held_until_as_many_have_come_as_were_answered() -> None:
    follow_ups = FollowUps(hold_share=0.25)
    assert hold_s(follow_ups, num_ended=0) == 0.0
    assert hold_s(follow_ups, num_ended=2) == pytest.approx(0.005)
    follow_ups.on_arrival(4.999)  # sent while the step ran: it follows none of them
    follow_ups.on_arrival(5.001)
    assert 0.0 < follow_ups.left_s(5.002) < 0.004
    follow_ups.on_arrival(5.002)
    assert follow_ups.left_s(5.002) == 0.0
    follow_ups.on_arrival(5.002)  # nobody was waiting for it
    assert follow_ups.left_s(5.002) == 0.0


def test_a_hold_is_a_part_of_the_step_and_bounded() -> None:
    follow_ups = FollowUps(hold_share=0.25)
    assert hold_s(follow_ups, step_s=60.0) == pytest.approx(MAX_HOLD_S)
    assert follow_ups.left_s(5.0 + 2 * MAX_HOLD_S) == 0.0
    assert hold_s(follow_ups, step_s=0.001) == pytest.approx(0.00025)


def test_nobody_is_waited_for_where_few_come_in_time_but_now_and_then() -> None:
    follow_ups = FollowUps()
    num_holds = 0
    for number in range(1000):
        if hold_s(follow_ups, now_s=float(number)):
            num_holds += 1
            assert follow_ups.left_s(number + 0.5) == 0.0
    assert 1000 / NUM_LET_PASS <= num_holds <= 1000 / NUM_LET_PASS + 8


def test_who_comes_in_time_again_is_waited_for_again() -> None:
    follow_ups = FollowUps()
    for number in range(100):  # nobody comes
        hold_s(follow_ups, now_s=float(number))
        follow_ups.left_s(number + 0.5)
    holds = []
    for number in range(100, 1000):
        holds.append(hold_s(follow_ups, now_s=float(number)) > 0.0)
        follow_ups.on_arrival(float(number))
    assert not all(holds[:100]) and all(holds[-400:])


def test_half_of_them_are_enough() -> None:
    assert LEAST_IN_TIME == 0.5
    follow_ups = FollowUps()
    holds = []
    for number in range(300):
        holds.append(hold_s(follow_ups, num_ended=4, now_s=float(number)) > 0.0)
        for _ in range(3):
            follow_ups.on_arrival(float(number))
        follow_ups.left_s(number + 0.5)
    assert all(holds)


def test_a_request_that_follows_an_answer_is_in_the_very_next_step() -> None:
    """However late it is sent, as long as the step is held."""
    backend = GatedBackend()
    engine = engine_on(backend)
    news: list[StepNews] = []
    has_ended, has_begun = threading.Event(), threading.Event()

    def deliver(each: StepNews) -> None:
        news.append(each)
        if any(event.finish_reason for event in each.events):
            has_ended.set()
        if "next" in each.started_ids:
            has_begun.set()

    thread = EngineThread(engine, deliver, follow_ups=FollowUps(hold_share=1e6, max_hold_s=30.0))
    backend.gate.clear()
    thread.start()
    thread.submit(request("short", 2))
    thread.submit(request("long", 300))
    backend.gate.set()
    assert has_ended.wait(10)
    num_steps = engine.stats().num_steps
    time.sleep(0.05)
    assert engine.stats().num_steps == num_steps, "the step is held"
    thread.submit(request("next", 2))
    assert has_begun.wait(10)
    (first,) = [each for each in news if "next" in each.started_ids]
    assert news[news.index(first) - 1].events[0].finish_reason == "length", "in the step after the end"
    assert 0.05 <= thread.held_s < 10
    thread.close()
    assert thread.join(10)


def test_while_others_wait_no_step_is_held() -> None:
    engine = engine_on(GatedBackend())
    has_answered = threading.Event()

    def deliver(each: StepNews) -> None:
        if any(event.request_id == "last" and event.finish_reason for event in each.events):
            has_answered.set()

    thread = EngineThread(engine, deliver, follow_ups=FollowUps(hold_share=1e6, max_hold_s=30.0))
    thread.start()
    for number in range(30):  # eight run at a time
        thread.submit(request(str(number), 3))
    thread.submit(request("last", 3))
    assert has_answered.wait(20)
    thread.close()
    assert thread.join(10)


def test_no_step_is_held_where_nobody_could_board() -> None:
    for options in ({"batching": "static"}, {"max_num_seqs": 2}):
        backend = GatedBackend()
        engine = engine_on(backend, **options)
        has_answered = threading.Event()

        def deliver(each: StepNews, has_answered: threading.Event = has_answered) -> None:
            if any(event.request_id == "long" and event.finish_reason for event in each.events):
                has_answered.set()

        thread = EngineThread(engine, deliver, follow_ups=FollowUps(hold_share=1e6, max_hold_s=30.0))
        backend.gate.clear()
        thread.start()
        thread.submit(request("first", 2))
        thread.submit(request("long", 30))
        if "max_num_seqs" in options:
            thread.submit(request("next", 40))  # takes the place of the first
        backend.gate.set()
        assert has_answered.wait(20)
        assert thread.held_s < 1.0
        thread.close()
        assert thread.join(10)
