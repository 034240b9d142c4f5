"""A closed loop of short prompts under each objective, in virtual time: waits for the first token and the next."""

from __future__ import annotations

import random
from statistics import median

import pytest

from ropeway.core.recipe import SchedulerRecipe
from ropeway.sim.cost_model import TWO_CORES, CostModel
from ropeway.sim.simulator import Arrival, Lengths, Passage, make_arrival, simulate

NUM_CLIENTS = 32


def recipe(objective: str, cost: CostModel) -> SchedulerRecipe:
    first_s, middle_s, last_s = cost.token_s
    return SchedulerRecipe(
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        num_kv_blocks=4096,
        objective=objective,  # type: ignore[arg-type]
        step_fixed_s=cost.fixed_s,
        step_token_s=middle_s,
        step_later_token_s=last_s,
        step_pair_s=cost.pair_s,
        step_row_s=cost.row_s,
    )


def serve(objective: str, num_requests: int = 320) -> list[Passage]:
    """32 clients; prompts of 128 tokens and answers of 64 in the mean, both ragged."""
    draw = random.Random(0)

    def arrival(number: int, arrival_s: float) -> Arrival:
        num_prompt_tokens = max(1, min(512, round(draw.lognormvariate(4.53, 0.8))))
        num_output_tokens = max(1, min(256, round(draw.lognormvariate(3.75, 0.9))))
        return make_arrival(number, arrival_s, Lengths(num_prompt_tokens, num_output_tokens, num_output_tokens))

    def follow_up(passage: Passage) -> Arrival | None:
        number = int(passage.arrival.request.request_id) + NUM_CLIENTS
        return arrival(number, passage.end_s or 0.0) if number < num_requests else None

    simulation = simulate(recipe(objective, TWO_CORES).make(), TWO_CORES, noise=0.05)
    simulation.run([arrival(number, 0.0) for number in range(NUM_CLIENTS)], follow_up=follow_up)
    assert len(simulation.passages) == num_requests
    return simulation.passages[NUM_CLIENTS:]


@pytest.mark.parametrize(("objective", "ttft_s", "tpot_s"), [("balanced", 0.5, 0.15), ("throughput", 0.8, 0.3)])
def test_a_full_house_waits_neither_for_the_first_token_nor_long_for_the_next(
    objective: str, ttft_s: float, tpot_s: float
) -> None:
    passages = serve(objective)
    assert median(passage.ttft_s for passage in passages) < ttft_s
    tpots_s = [passage.tpot_s for passage in passages if passage.tpot_s is not None]
    assert median(tpots_s) < tpot_s
