"""An hour of mixed traffic, logged and replayed: the schedule must come out the same, byte for byte.

    make evidence-replay                  an hour of virtual time
    make evidence-replay ARGS=--real      a minute and a half of it on a real server, whose log must replay as well

On the server, clients leave once they have so many tokens, and there is neither background work nor a step that fails.
The same minutes in virtual time must then look alike to the clients.

Mixed: two interactive tenants and a background one, several users, prompts that begin alike, answers in threes, clients
who leave, texts that end early, steps that fail, a pool that is too small for the busy quarters of the hour.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.real import World, compared, serve
from harness.results import new_document, result_path, save
from harness.virtual import make_parser, percentile, prior_of, tell, ttfts_s, verdict
from ropeway.bench.workload import LengthDistribution
from ropeway.core.decision_log import DecisionLog
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.plan import StepPlan
from ropeway.core.recipe import SchedulerRecipe
from ropeway.engine.decision_log_file import DecisionLogFile
from ropeway.engine.decision_recorder import DecisionRecorder, RecordingHasher
from ropeway.engine.engine import Engine
from ropeway.sim.cost_model import TWO_CORES
from ropeway.sim.recorded_steps import recorded_steps
from ropeway.sim.replay import Replay, ReplayDifference
from ropeway.sim.simulator import STOP_TOKEN_ID, AnswerLengths, Arrival, ScriptedRunner, Simulation, VirtualClock
from ropeway.sim.timeline import Timeline

HOUR_S = 3600.0
QUARTER_RATES = (1.2, 4.5, 2.5, 5.5)  # requests per second: two of the four are beyond what the machine can do
FAIL_EVERY = 2_000
MAX_LOG_BYTES = 1 << 30
PROMPTS, OUTPUTS = LengthDistribution(180, 0.9, 900), LengthDistribution(70, 0.9, 400)


class SometimesFailing(ScriptedRunner):
    """Every FAIL_EVERY-th step cannot be computed."""

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        if plan.step_id % FAIL_EVERY == FAIL_EVERY - 1:
            self.collect()
            raise RuntimeError("a step that fails on purpose")


def traffic(duration_s: float, seed: int, rates: Sequence[float] = QUARTER_RATES) -> list[Arrival]:
    """Arrivals of `duration_s`, whose four quarters have these rates."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    arrivals: list[Arrival] = []
    now_s = 0.0
    for number in itertools.count():
        now_s += draw.expovariate(rates[min(3, int(4 * now_s / duration_s))])
        if now_s >= duration_s:
            return arrivals
        num_prompt_tokens, num_output_tokens = PROMPTS.draw(rng, 1)[0], OUTPUTS.draw(rng, 1)[0]
        system = draw.choice((0, 0, 1, 2))  # of three prompts that many begin with, or none
        own = [(number * 1_009 + i) % 32_000 + 100 for i in range(num_prompt_tokens)]
        prompt = [*range(1_000 * system + 100, 1_000 * system + 100 + 96 * bool(system)), *own]
        max_tokens = draw.choice((64, 256, 512))
        request = Request(
            request_id=f"{number}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(n=draw.choice((1,) * 9 + (3,)), max_tokens=max_tokens),
            max_tokens=max_tokens,
            seed=0,
            stop_token_ids=frozenset({STOP_TOKEN_ID}),
            terms=ServiceTerms(
                tenant=draw.choice(("north", "north", "south", "night")),
                user=draw.choice((None, "a", "b")),
                is_background=draw.random() < 0.15,
            ),
        )
        arrivals.append(Arrival(now_s, request, num_output_tokens))
    raise AssertionError("the arrivals end by time")


def recipe_for(prior: dict[str, float]) -> SchedulerRecipe:
    return SchedulerRecipe(
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=2048,
        num_kv_blocks=700,
        has_prefix_cache=True,
        **prior,
    )


def leave_and_stop(seed: int) -> Callable[[Simulation], None]:
    """Now and then a client leaves, or the text of an answer ends."""
    draw = random.Random(seed)

    def on_step(simulation: Simulation) -> None:
        if draw.random() < 0.004 and (open_ids := simulation.open_ids):
            simulation.abort(draw.choice(open_ids))
        if draw.random() < 0.004 and (open_ids := simulation.open_ids):
            simulation.stop(draw.choice(open_ids), 0)

    return on_step


def record(path: Path, duration_s: float, seed: int) -> Simulation:
    """Writes the log of `duration_s` of traffic."""
    logging.getLogger("ropeway.engine.engine").setLevel(logging.CRITICAL)  # steps fail on purpose
    recipe = recipe_for(prior_of(TWO_CORES))
    log = DecisionLogFile(path, recipe.to_values(), MAX_LOG_BYTES)
    recorder = DecisionRecorder(log.put, os.urandom(32))
    clock, lengths = VirtualClock(), AnswerLengths()
    runner = SometimesFailing(clock, TWO_CORES, lengths, noise=0.05, seed=seed)
    scheduler = recipe.make(RecordingHasher(recipe.block_size, recorder.note_hash))
    simulation = Simulation(Engine(scheduler, runner, clock, recorder), lengths, clock)
    simulation.run(traffic(duration_s, seed), on_step=leave_and_stop(seed))
    log.close()
    return simulation


def replay(path: Path) -> dict[str, Any]:
    """Replays a log; the figures, with the difference where there is one."""
    data = path.read_bytes()
    replaying, timeline = Replay(DecisionLog(data)), Timeline()
    start_s, difference, num_records = time.monotonic(), None, 0
    try:
        for replayed in replaying.run():
            timeline.take(replayed.record)
            num_records += 1
    except ReplayDifference as found:
        difference = str(found)
    stats = replaying.stats()
    return {
        "is_identical": difference is None and replaying.cut_at is None,
        "difference": difference,
        "num_records": num_records,
        "num_bytes": len(data),
        "replay_wall_s": time.monotonic() - start_s,
        "num_steps": stats.num_steps,
        "num_failed_steps": stats.num_failed_steps,
        "num_preemptions": stats.num_preemptions,
        "num_prefix_hits": stats.num_prefix_hits,
        "num_finished": dict(stats.num_finished),
        "timeline": timeline,
        "stats": stats,
    }


REAL_DURATION_S = 90.0
REAL_RATES = (1.0, 4.0, 2.0, 5.0)
NUM_BEFORE_LEAVING = 12


def drive_real(world: World, seed: int) -> dict[str, Any]:
    """A minute and a half of traffic like the hour's; the figures of those who stayed."""
    arrivals = [
        replace(a, request=replace(a.request, terms=replace(a.request.terms, is_background=False)))
        for a in traffic(REAL_DURATION_S, seed, REAL_RATES)
    ]
    leaving = {a.request.request_id for a in arrivals[::15]}

    def leave(world: World) -> None:
        for passage in world.passages:
            request_id = passage.arrival.request.request_id
            if request_id in leaving and passage.num_output_tokens >= NUM_BEFORE_LEAVING and passage.end_s is None:
                world.abort(request_id)

    world.run(arrivals, on_step=leave)
    stayed = [passage for passage in world.passages if passage.finish_reason != "abort"]
    tpots_s = [p.tpot_s for p in stayed if p.arrival.request.params.n == 1 and p.tpot_s is not None]
    return {
        "num_requests": len(arrivals),
        "num_left": len(arrivals) - len(stayed),
        "output_tokens_per_s": world.num_output_tokens / world.clock(),
        "ttft_p50_s": percentile(ttfts_s(stayed), 0.5),
        "ttft_p99_s": percentile(ttfts_s(stayed), 0.99),
        "tpot_p50_s": percentile(tpots_s, 0.5),
        "tpot_p99_s": percentile(tpots_s, 0.99),
    }


def replay_real(seed: int) -> int:
    """The log of a server must replay; and the same traffic in virtual time must look alike."""
    run = serve(recipe_for({}), lambda world: drive_real(world, seed), ("north", "south", "night"))
    document = new_document("replay-real", {"seed": seed, "recipe": run.recipe.to_values()})
    figures = ("output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
    num_recorded = len(recorded_steps(DecisionLog(run.log)))
    verdicts = [
        verdict(
            "steps of the server's log replayed byte for byte", run.stats.num_steps, num_recorded, is_at_most=False
        ),
        *compared(run, lambda world: drive_real(world, seed), figures, document),
    ]
    return tell(document, result_path(document), verdicts)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--duration", type=float, default=HOUR_S, metavar="SECONDS", help="of virtual time")
    args = parser.parse_args()
    if args.real:
        return replay_real(args.seed)
    document = new_document("replay", {"seed": args.seed, "duration_s": args.duration})
    path = result_path(document)
    log_path = path.with_suffix(".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    stats = record(log_path, args.duration, args.seed).engine.stats()
    document["record_wall_s"] = time.monotonic() - start_s
    print(f"recorded {stats.num_steps} steps in {document['record_wall_s']:.0f} s", flush=True)
    result = replay(log_path)
    timeline, rebuilt = result.pop("timeline"), result.pop("stats")
    document |= result
    save(path, document)
    first_s = min(lane.since_s for lane in timeline.lanes.values())
    path.with_suffix(".svg").write_text(timeline.svg("The first two minutes", first_s, first_s + 120))
    log_path.unlink()
    for name, value in result.items():
        print(f"{name:<18} {value}")
    verdicts = [
        verdict("the replay is identical", float(result["is_identical"]), 1, is_at_most=False),
        verdict("counters are those of the recording", float(rebuilt == stats), 1, is_at_most=False),
        verdict("bytes per step", result["num_bytes"] / result["num_steps"], 400, is_at_most=True),
    ]
    return tell(document, path, verdicts)


if __name__ == "__main__":
    sys.exit(main())
