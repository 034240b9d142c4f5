"""Steps held for clients that answer an end with their next request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ropeway.core.params import Request
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


class Held:
    """An engine thread that holds steps for as long as the test takes. news: all that it delivered."""

    def __init__(self, **options: Any) -> None:
        self.backend = GatedBackend()
        self.engine = engine_on(self.backend, **options)
        self.news: list[StepNews] = []
        self._has_news = threading.Condition()
        self.thread = EngineThread(self.engine, self._deliver, follow_ups=FollowUps(hold_share=1e6, max_hold_s=30.0))
        self.thread.start()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.close()
        assert self.thread.join(10)

    def submit_together(self, *requests: Request) -> None:
        """They are there before the first step ends."""
        self.backend.gate.clear()
        for each in requests:
            self.thread.submit(each)
        self.backend.gate.set()

    def wait_until(self, is_so: Callable[[StepNews], bool]) -> StepNews:
        """The first news of which it is so."""
        with self._has_news:
            assert self._has_news.wait_for(lambda: any(map(is_so, self.news)), timeout=20)
            return next(filter(is_so, self.news))

    def wait_for_end(self, request_id: str) -> None:
        self.wait_until(lambda news: any(e.request_id == request_id and e.finish_reason for e in news.events))

    def _deliver(self, news: StepNews) -> None:
        with self._has_news:
            self.news.append(news)
            self._has_news.notify()


def test_a_request_that_follows_an_answer_is_in_the_very_next_step() -> None:
    """However late it is sent, as long as the step is held."""
    with Held() as held:
        held.submit_together(request("short", 2), request("long", 300))
        held.wait_for_end("short")
        num_steps = held.engine.stats().num_steps
        time.sleep(0.05)
        assert held.engine.stats().num_steps == num_steps, "the step is held"
        held.thread.submit(request("next", 2))
        first = held.wait_until(lambda news: "next" in news.started_ids)
        before = held.news[held.news.index(first) - 1]
        assert before.events[0].finish_reason == "length", "in the step after the end"
        assert 0.05 <= held.thread.held_s < 10


@pytest.mark.parametrize("options", [{}, {"batching": "static"}], ids=str)
def test_no_step_is_held_where_others_wait_or_nobody_may_board(options: dict[str, str]) -> None:
    with Held(**options) as held:
        held.submit_together(*[request(str(number), 3 + 20 * (number == 30)) for number in range(31)])
        held.wait_for_end("29")
        assert held.thread.held_s < 1.0


def test_no_step_is_held_where_every_place_is_taken() -> None:
    with Held(max_num_seqs=2) as held:
        held.submit_together(request("first", 2), request("long", 30), request("next", 40))
        held.wait_for_end("long")
        assert held.thread.held_s < 1.0
