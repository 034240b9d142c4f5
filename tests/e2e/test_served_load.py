"""An experiment's load on a real server: answers end where they were scripted to, and its schedule can be repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.real import World, serve
from ropeway.core.params import ServiceTerms
from ropeway.core.recipe import SchedulerRecipe
from ropeway.sim.simulator import Lengths, Passage, make_arrival

RECIPE = SchedulerRecipe(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256, num_kv_blocks=64, has_prefix_cache=True
)
LENGTHS = [Lengths(5 + 9 * n % 60, 1 + 5 * n % 30, 24) for n in range(12)]  # some would go on past max_tokens
LENGTHS_OF_LEAVING = Lengths(60, 190, 190)


def drive(world: World) -> dict[str, Any]:
    """Two clients who send one after the other, and a third who leaves."""

    def arrival(number: int, at_s: float) -> Any:
        lengths = LENGTHS[number] if number < len(LENGTHS) else LENGTHS_OF_LEAVING
        return make_arrival(number, at_s, lengths, ServiceTerms(tenant=("one", "two")[number % 2]))

    def follow_up(passage: Passage) -> Any:
        number = int(passage.arrival.request.request_id) + 2
        return arrival(number, world.clock()) if number < len(LENGTHS) else None

    def leave(world: World) -> None:
        for passage in world.passages:
            if passage.arrival.request.request_id == "13" and passage.num_output_tokens >= 2 and passage.end_s is None:
                world.abort("13")

    world.run([arrival(0, 0.0), arrival(1, 0.0), arrival(13, 0.05)], follow_up=follow_up, on_step=leave)
    whole = sorted(
        (p for p in world.passages if p.finish_reason != "abort"), key=lambda p: int(p.arrival.request.request_id)
    )
    return {
        "num_output_tokens": [p.num_output_tokens for p in whole],
        "reasons": [p.finish_reason for p in whole],
        "num_left": sum(p.finish_reason == "abort" for p in world.passages),
        "are_times_in_order": all(p.arrival.arrival_s <= p.first_token_s <= p.end_s for p in whole),  # type: ignore[operator]
    }


def test_a_load_on_a_server_ends_as_scripted_and_its_log_replays(tiny_model_path: Path) -> None:
    run = serve(RECIPE, drive, ("one", "two"), tiny_model_path)
    assert run.figures["num_output_tokens"] == [min(each.num_output_tokens, 24) for each in LENGTHS]
    assert set(run.figures["reasons"]) == {"stop", "length"}
    assert run.figures["num_left"] == 1 and run.figures["are_times_in_order"]
    assert run.stats.num_finished["abort"] == 1  # counted as the scheduler replayed from the server's log
    assert run.recipe.max_num_seqs == 4 and run.recipe.step_fixed_s > 0  # calibrated by the server itself
    assert run.machine.noise > 0 and 0 < run.turnaround_s < 5


def test_a_server_that_would_schedule_otherwise_is_refused(tiny_model_path: Path) -> None:
    with pytest.raises(SystemExit, match="has_prefix_cache"):
        serve(
            SchedulerRecipe(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256, num_kv_blocks=64),
            lambda world: world.run([make_arrival(0, 0.0, Lengths(5, 9, 24))]) or {},  # type: ignore[func-returns-value]
            (),
            tiny_model_path,
        )
