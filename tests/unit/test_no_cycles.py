"""What ends is freed at once, without the garbage collector, which seldom runs in a server."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from tests.support.schedulers import POLICIES

from ropeway.core.params import ServiceTerms
from ropeway.core.waiting_line import WaitingLine
from support.scheduling import make_request, make_scheduler, run_step


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_a_scheduler_leave_no_circles(policy: str, without_collections: None) -> None:
    scheduler = make_scheduler(line=WaitingLine(POLICIES[policy]), max_num_seqs=2)

    def serve(number: int, num_requests: int) -> None:
        """Some are aborted, the rest runs to its end."""
        for index in range(num_requests):
            terms = ServiceTerms(tenant=f"t{index % 2}", user=f"u{index}")
            scheduler.add(make_request(f"{number}-{index}", 3, 2, terms=terms), 0.0)
        scheduler.abort(f"{number}-0")
        while scheduler.has_work:
            run_step(scheduler)

    serve(0, 4)
    gc.collect()
    for number in range(1, 30):
        serve(number, 1 + number % 4)
    assert gc.collect() < 30  # of what the loop itself made; a circle would be there for every request
