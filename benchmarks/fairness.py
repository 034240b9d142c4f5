"""Fairness: one tenant floods, another sends one request at a time. How long does the second wait for its first token?

    make evidence-fairness                  vtc and fcfs, alone and flooded, in virtual time
    make evidence-fairness ARGS=--real      the flooded point under vtc on a real server, and again in virtual time

The flood is 50 clients that send prompts of 512 tokens and take 256 back, each again as soon as it is answered: 50
requests open for the other tenant's one, which keeps the batch (32) and the pool full. The other sends 128 tokens,
takes 32, and thinks for a second on average.

Target: under vtc its TTFT p99 is at most twice what it is alone plus two steps (the median step while flooded).
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

from harness.real import World, compare
from harness.virtual import (
    Point,
    find,
    make_parser,
    open_document,
    percentile,
    prior_of,
    run_points,
    tell,
    ttfts_s,
    verdict,
)
from ropeway.bench.plot import Panel, Series, render_svg
from ropeway.core.params import ServiceTerms
from ropeway.core.recipe import SchedulerRecipe
from ropeway.sim.cost_model import COST_MODELS
from ropeway.sim.simulator import Arrival, Lengths, Passage, Simulation, make_arrival, simulate

FLOOD, QUIET = "flood", "quiet"
NUM_FLOODING = 50
FLOOD_LENGTHS, QUIET_LENGTHS = Lengths(512, 300, 256), Lengths(128, 40, 32)
BATCH, BLOCK_SIZE = 32, 16
NUM_BLOCKS = BATCH * (FLOOD_LENGTHS.num_prompt_tokens + FLOOD_LENGTHS.max_tokens) // BLOCK_SIZE
WARM_UP_S = 30.0
NOISE = 0.05
POLICIES = ("vtc", "fcfs")


class Clients:
    """The flood, and the one who comes later and sends num_quiet requests; the flood ends with it."""

    def __init__(self, world: World, *, num_flooding: int, num_quiet: int, seed: int) -> None:
        self._world = world
        self._num_flooding = num_flooding
        self._num_quiet = num_quiet
        self._random = random.Random(seed)
        self._num_sent = 0
        self._num_quiet_sent = 0

    def first(self, quiet_s: float) -> list[Arrival]:
        # The flood's answers end apart from each other, as if it had gone on for long.
        flood = [
            self._flood(0.0, Lengths(512, 256 * (client + 1) // self._num_flooding, 256))
            for client in range(self._num_flooding)
        ]
        return [*flood, self._quiet(quiet_s)]

    def next(self, passage: Passage) -> Arrival | None:
        now_s = self._world.clock()
        if passage.arrival.request.terms.tenant == FLOOD:
            return self._flood(now_s, FLOOD_LENGTHS) if self._num_quiet_sent < self._num_quiet else None
        if self._num_quiet_sent < self._num_quiet:
            return self._quiet(now_s + self._random.expovariate(1.0))
        return None

    def _flood(self, at_s: float, lengths: Lengths) -> Arrival:
        self._num_sent += 1
        return make_arrival(self._num_sent, at_s, lengths, ServiceTerms(tenant=FLOOD))

    def _quiet(self, at_s: float) -> Arrival:
        self._num_sent += 1
        self._num_quiet_sent += 1
        return make_arrival(self._num_sent, at_s, QUIET_LENGTHS, ServiceTerms(tenant=QUIET))


def recipe_for(policy: str, prior: dict[str, float]) -> SchedulerRecipe:
    return SchedulerRecipe(
        max_num_seqs=BATCH,
        max_num_batched_tokens=512,
        max_model_len=2048,
        num_kv_blocks=NUM_BLOCKS,
        scheduling_policy=policy,
        has_prefix_cache=True,
        **prior,
    )


def drive(
    world: World,
    *,
    num_flooding: int,
    num_quiet: int,
    seed: int,
    warm_up_s: float,
    on_step: Callable[[Any], None] | None = None,
) -> dict[str, Any]:
    """Runs it; the figures of the quiet tenant, and the tokens of both."""
    clients = Clients(world, num_flooding=num_flooding, num_quiet=num_quiet, seed=seed)
    start_s = world.clock()
    world.run(clients.first(start_s + warm_up_s), follow_up=clients.next, on_step=on_step)
    quiet = [p for p in world.passages if p.arrival.request.terms.tenant == QUIET]
    flood = [p for p in world.passages if p.arrival.request.terms.tenant == FLOOD and p.arrival.arrival_s > warm_up_s]
    return {
        "num_quiet": len(quiet),
        "ttft_p50_s": percentile(ttfts_s(quiet), 0.5),
        "ttft_p99_s": percentile(ttfts_s(quiet), 0.99),
        "flood_ttft_p50_s": percentile(ttfts_s(flood), 0.5) if flood else 0.0,
        "tpot_p50_s": percentile([p.tpot_s for p in quiet if p.tpot_s is not None], 0.5),
        "output_tokens_per_s": world.num_output_tokens / (world.clock() - start_s),
    }


def measure(point: Point) -> dict[str, Any]:
    """One run in virtual time."""
    cost = COST_MODELS[str(point["machine"])]
    seed = int(str(point["seed"]))
    recipe = recipe_for(str(point["policy"]), prior_of(cost))
    num_flooding = NUM_FLOODING if point["is_flooded"] else 0
    simulation = simulate(recipe.make(), cost, noise=NOISE, seed=seed)
    times_s: list[float] = []
    num_running: list[int] = []
    before_s = simulation.clock()

    def on_step(simulation: Simulation) -> None:
        nonlocal before_s
        now_s, stats = simulation.clock(), simulation.engine.stats()
        if num_flooding == 0 or stats.num_running >= BATCH // 2:
            times_s.append(now_s - before_s)
            num_running.append(stats.num_running)
        before_s = now_s

    figures = drive(
        simulation,
        num_flooding=num_flooding,
        num_quiet=int(str(point["num_quiet"])),
        seed=seed,
        warm_up_s=WARM_UP_S,
        on_step=on_step,
    )
    quiet = [p for p in simulation.passages if p.arrival.request.terms.tenant == QUIET]
    return {
        **figures,
        "median_step_s": statistics.median(times_s),
        "mean_running": statistics.fmean(num_running),
        "num_preemptions": simulation.engine.stats().num_preemptions,
        "ttfts_s": sorted(ttfts_s(quiet)),
    }


def points_of(machines: tuple[str, ...], num_quiet: int, seed: int) -> list[Point]:
    return [
        {"machine": machine, "policy": policy, "is_flooded": is_flooded, "num_quiet": num_quiet, "seed": seed}
        for machine in machines
        for policy in POLICIES
        for is_flooded in (True, False)
    ]


def verdicts_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    verdicts = []
    for machine in sorted({item["point"]["machine"] for item in document["points"]}):
        flooded = find(document, machine=machine, policy="vtc", is_flooded=True)
        alone = find(document, machine=machine, policy="vtc", is_flooded=False)
        limit = 2 * alone["ttft_p99_s"] + 2 * flooded["median_step_s"]
        name = f"{machine}: TTFT p99 of the quiet tenant, s (twice {alone['ttft_p99_s']:.3f} + 2 steps)"
        verdicts.append(verdict(name, flooded["ttft_p99_s"], limit, is_at_most=True))
    return verdicts


def plot(document: dict[str, Any]) -> str:
    panels = []
    lines = (("alone", "vtc", False), ("flooded, vtc", "vtc", True), ("flooded, fcfs", "fcfs", True))
    x_label, y_label = "percentile of its requests", "TTFT of the quiet tenant, s"
    for machine in sorted({item["point"]["machine"] for item in document["points"]}):
        series = []
        for name, policy, is_flooded in lines:
            times = find(document, machine=machine, policy=policy, is_flooded=is_flooded)["ttfts_s"]
            shares = [*range(2, 99, 4), 99, 100]
            series.append(Series(name, tuple((share, percentile(times, share / 100)) for share in shares)))
        panels.append(Panel(machine, x_label, y_label, tuple(series)))
        panels.append(Panel(f"{machine}, without fcfs", x_label, y_label, tuple(series[:2])))
    return render_svg("One tenant floods, another sends one request at a time", panels)


def compare_with_real(args: Any) -> int:
    """The flood under vtc, on a server and in virtual time."""
    return compare(
        "fairness",
        recipe_for("vtc", {}),
        lambda world: drive(world, num_flooding=NUM_FLOODING, num_quiet=30, seed=args.seed, warm_up_s=15.0),
        ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "flood_ttft_p50_s", "output_tokens_per_s"),
        (FLOOD, QUIET),
    )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-quiet", type=int, default=400, help="requests of the quiet tenant")
    parser.add_argument("--machines", nargs="+", choices=COST_MODELS, default=list(COST_MODELS))
    args = parser.parse_args()
    if args.real:
        return compare_with_real(args)
    options = {"num_flooding": NUM_FLOODING, "num_kv_blocks": NUM_BLOCKS, "max_num_seqs": BATCH, "noise": NOISE}
    document, path = open_document(args, "fairness", options)
    points = points_of(tuple(args.machines), args.num_quiet, args.seed)
    run_points(document, path, points, measure, args.jobs)
    path.with_suffix(".svg").write_text(plot(document))
    return tell(document, path, verdicts_of(document))


if __name__ == "__main__":
    sys.exit(main())
