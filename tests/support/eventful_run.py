"""A run in virtual time with preemptions, failures, clients who leave and texts that end, and its decision log."""

from __future__ import annotations

import random

from ropeway.core.decision_log import LogEncoder, Record
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.plan import StepPlan, StepResult
from ropeway.core.recipe import SchedulerRecipe
from ropeway.engine.decision_recorder import DecisionRecorder, RecordingHasher
from ropeway.engine.engine import Engine
from ropeway.sim.cost_model import TWO_CORES
from ropeway.sim.simulator import AnswerLengths, Arrival, ScriptedRunner, Simulation, VirtualClock

RECIPE = SchedulerRecipe(
    max_num_seqs=6,
    max_num_batched_tokens=24,
    max_model_len=128,
    num_kv_blocks=40,
    block_size=4,
    admission="optimistic",
)
COSTS = {"step_fixed_s": 4e-3, "step_token_s": 2e-3, "step_later_token_s": 1e-3, "step_pair_s": 1e-7}  # of its machine


class SometimesFailing(ScriptedRunner):
    """Fails each 40th step, and each 7th step one of its rows; ends one in each 11th, as a grammar does."""

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        if plan.step_id % 40 == 39:
            self.collect()
            raise RuntimeError("the step cannot be computed")

    def collect(self) -> StepResult:
        result = super().collect()
        step_id, ids, token_ids = result.step_id, result.sequence_ids, result.token_ids
        failed_ids, stopped_ids = ids[: step_id % 7 == 0], ids[1 : 1 + (step_id % 11 == 0)]
        num_failed = len(failed_ids)
        return StepResult(step_id, ids[num_failed:], token_ids[num_failed:], failed_ids, stopped_ids)


def arrivals(count: int, draw: random.Random) -> list[Arrival]:
    result = []
    for number in range(count):
        num_prompt_tokens, max_tokens = draw.randint(1, 40), draw.randint(1, 60)
        request = Request(
            request_id=f"request-{number}",
            prompt_token_ids=tuple(range(first := draw.choice((0, 0, 7)), first + num_prompt_tokens)),
            params=SamplingParams(n=draw.choice((1, 1, 3)), max_tokens=max_tokens),
            max_tokens=max_tokens,
            seed=0,
            stop_token_ids=frozenset({0} if number % 4 else ()),  # of the others, only max_tokens
            terms=ServiceTerms(
                tenant=draw.choice(("", "secret-tenant")),
                weight=(1.0, 1.0, 3.0)[number % 3],
                is_background=draw.random() < 0.2,
                timeout_s=draw.choice((None, 4.0)),
                queue_timeout_s=draw.choice((None, 0.5)),
            ),
        )
        result.append(Arrival(draw.random() * 10, request, draw.randint(1, 80)))
    return result


def record(recipe: SchedulerRecipe, num_requests: int = 60, seed: int = 0) -> tuple[list[Record], bytes]:
    """The records of an eventful run: preemptions, failures, clients who leave, texts that end."""
    draw = random.Random(seed)
    records: list[Record] = []
    clock, lengths = VirtualClock(1_000.0), AnswerLengths()
    runner = SometimesFailing(clock, TWO_CORES, lengths)
    recorder = DecisionRecorder(records.append, b"key")
    scheduler = recipe.make(RecordingHasher(recipe.block_size, recorder.note_hash))
    engine = Engine(scheduler, runner, clock, recorder)
    simulation = Simulation(engine, lengths, clock)

    def on_step(simulation: Simulation) -> None:
        if simulation.open_ids and draw.random() < 0.05:
            simulation.abort(draw.choice(simulation.open_ids))
        if simulation.open_ids and draw.random() < 0.05:
            simulation.stop(draw.choice(simulation.open_ids), 0)

    simulation.run(arrivals(num_requests, draw), on_step=on_step)
    encoder = LogEncoder()
    return records, b"".join([encoder.header(recipe.to_values()), *map(encoder.encode, records)])
