"""No collapse: a pool for a quarter of the load, answers of unknown length, and a load that changes half-way.

    make evidence-no-collapse                  every admission at every concurrency limit, in virtual time
    make evidence-no-collapse ARGS=--real      one smaller point on a real server, and again in virtual time

128 clients of three tenants send one request after the other. Every request says max_tokens 1024 and ends earlier by a
sampled stop token; how much earlier depends on the tenant, and changes abruptly when half of the requests were sent.
The pool holds a quarter of what the 128 would fill. Throughput is output tokens per second until the last request was
sent, so that the drain of the last answers, in which no scheduler has a choice, does not blur it.

Targets: `predictive`, with no limit on concurrency, reaches 0.95 of the best throughput over all fixed limits (under
any admission), and computes at most 2 % of its tokens again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from harness.real import World, compare
from harness.virtual import (
    Point,
    find,
    find_all,
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
from ropeway.bench.workload import LengthDistribution
from ropeway.core.params import ServiceTerms
from ropeway.core.recipe import SchedulerRecipe
from ropeway.sim.cost_model import COST_MODELS
from ropeway.sim.simulator import Arrival, Lengths, Passage, make_arrival, simulate

MAX_TOKENS = 1024
# Every limit is tried where it matters: an optimistic batch. `reserve` is full with 8; `predictive` limits itself.
LIMITS = {
    "predictive": (8, 16, 24, 32, 48, 128),
    "optimistic": (8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 64, 96, 128),
    "reserve": (4, 8, 16, 128),
}
ADMISSIONS = tuple(LIMITS)
NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Tenant:
    """Prompts of one length distribution, outputs of another, and of a third once the load has changed."""

    name: str
    prompts: LengthDistribution
    outputs: LengthDistribution
    later_outputs: LengthDistribution


def _lengths_of(mean: float, sigma: float) -> LengthDistribution:
    return LengthDistribution(mean, sigma, 1000)  # below MAX_TOKENS: every answer ends by itself


TENANTS = (
    Tenant("chat", _lengths_of(96, 0.6), _lengths_of(90, 0.7), _lengths_of(260, 0.5)),
    Tenant("essay", _lengths_of(48, 0.4), _lengths_of(420, 0.4), _lengths_of(70, 0.8)),
    Tenant("code", _lengths_of(220, 0.7), _lengths_of(160, 0.8), _lengths_of(330, 0.6)),
)


@dataclass(frozen=True, slots=True)
class Load:
    """num_clients, who send num_requests in all."""

    num_clients: int
    num_requests: int
    seed: int

    def lengths(self) -> list[list[Lengths]]:
        """[request][tenant]: what that request would be, were it that tenant's."""
        return _lengths(self)

    def pool_blocks(self, block_size: int = 16) -> int:
        """A quarter of the blocks that the clients would fill, each with its one request, averaged over time."""
        each = [lengths for row in self.lengths() for lengths in row]
        tokens_x_time = sum(e.num_prompt_tokens * e.num_output_tokens + e.num_output_tokens**2 / 2 for e in each)
        mean_tokens = tokens_x_time / sum(e.num_output_tokens for e in each)
        return round(self.num_clients * mean_tokens / block_size / 4)


@lru_cache
def _lengths(load: Load) -> list[list[Lengths]]:
    columns = []
    for number, tenant in enumerate(TENANTS):
        rng = np.random.default_rng((load.seed, number))
        half = load.num_requests // 2
        prompts = tenant.prompts.draw(rng, load.num_requests)
        outputs = tenant.outputs.draw(rng, half) + tenant.later_outputs.draw(rng, load.num_requests - half)
        columns.append([Lengths(p, o, MAX_TOKENS) for p, o in zip(prompts, outputs, strict=True)])
    return [list(row) for row in zip(*columns, strict=True)]


class Clients:
    """A closed loop over the load: client c belongs to tenant c mod 3, and sends the next request of all."""

    def __init__(self, load: Load, world: World) -> None:
        self._load = load
        self._world = world
        self._lengths = load.lengths()
        self._num_sent = 0
        self.last_sent_s = 0.0
        self.num_tokens_then = 0
        self._tenant_of: dict[str, int] = {}

    def first(self) -> list[Arrival]:
        return [self._send(client % len(TENANTS)) for client in range(self._load.num_clients)]

    def next(self, passage: Passage) -> Arrival | None:
        tenant = self._tenant_of.pop(passage.arrival.request.request_id)
        return self._send(tenant) if self._num_sent < self._load.num_requests else None

    def _send(self, tenant: int) -> Arrival:
        number, now_s = self._num_sent, self._world.clock()
        self._num_sent += 1
        self._tenant_of[str(number)] = tenant
        if self._num_sent == self._load.num_requests:
            self.last_sent_s = now_s
            self.num_tokens_then = self._world.num_output_tokens
        return make_arrival(number, now_s, self._lengths[number][tenant], ServiceTerms(tenant=TENANTS[tenant].name))


def recipe_for(load: Load, admission: str, limit: int, prior: dict[str, float]) -> SchedulerRecipe:
    return SchedulerRecipe(
        max_num_seqs=limit,
        max_num_batched_tokens=512,
        max_model_len=2048,
        num_kv_blocks=load.pool_blocks(),
        admission=admission,
        has_prefix_cache=True,
        **prior,
    )


def drive(world: World, load: Load) -> dict[str, Any]:
    """Runs the whole load; the figures of its clients."""
    clients = Clients(load, world)
    start_s = world.clock()
    world.run(clients.first(), follow_up=clients.next)
    tpots_s = [passage.tpot_s for passage in world.passages if passage.tpot_s is not None]
    return {
        "output_tokens_per_s": clients.num_tokens_then / (clients.last_sent_s - start_s),
        "ttft_p50_s": percentile(ttfts_s(world.passages), 0.5),
        "ttft_p90_s": percentile(ttfts_s(world.passages), 0.9),
        "ttft_p99_s": percentile(ttfts_s(world.passages), 0.99),
        "tpot_p50_s": percentile(tpots_s, 0.5),
        "tpot_p90_s": percentile(tpots_s, 0.9),
        "tpot_p99_s": percentile(tpots_s, 0.99),
        "duration_s": world.clock() - start_s,
    }


def measure(point: Point) -> dict[str, Any]:
    """One run in virtual time."""
    load = Load(int(str(point["num_clients"])), int(str(point["num_requests"])), int(str(point["seed"])))
    cost = COST_MODELS[str(point["machine"])]
    recipe = recipe_for(load, str(point["admission"]), int(str(point["limit"])), prior_of(cost))
    simulation = simulate(recipe.make(), cost, noise=NOISE, seed=load.seed)
    figures, stats = drive(simulation, load), simulation.engine.stats()
    num_computed = stats.num_prompt_tokens + stats.num_generation_tokens + stats.num_recomputed_tokens
    return {
        **figures,
        "recomputed_share": stats.num_recomputed_tokens / num_computed,
        "num_preemptions": stats.num_preemptions,
        "num_steps": stats.num_steps,
    }


def points_of(load: Load, machines: tuple[str, ...]) -> list[Point]:
    return [
        {
            "machine": machine,
            "admission": admission,
            "limit": limit,
            "num_clients": load.num_clients,
            "num_requests": load.num_requests,
            "seed": load.seed,
        }
        for machine in machines
        for admission in ADMISSIONS
        for limit in LIMITS[admission]
    ]


def verdicts_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    verdicts = []
    for machine in sorted({item["point"]["machine"] for item in document["points"]}):
        items = find_all(document, machine=machine)
        no_limit = max(item["point"]["limit"] for item in items)
        ours = find(document, machine=machine, admission="predictive", limit=no_limit)
        best = max(item["output_tokens_per_s"] for item in items)
        share = ours["output_tokens_per_s"] / best
        verdicts.append(verdict(f"{machine}: throughput over the best fixed limit's", share, 0.95, is_at_most=False))
        verdicts.append(verdict(f"{machine}: tokens computed again", ours["recomputed_share"], 0.02, is_at_most=True))
    return verdicts


def plot(document: dict[str, Any]) -> str:
    panels = []
    for machine in sorted({item["point"]["machine"] for item in document["points"]}):
        for name, label in (
            ("output_tokens_per_s", "output tokens/s"),
            ("ttft_p99_s", "TTFT p99, s"),
            ("recomputed_share", "share of tokens computed again"),
        ):
            series = []
            for admission in ADMISSIONS:
                items = sorted(
                    find_all(document, machine=machine, admission=admission), key=lambda i: i["point"]["limit"]
                )
                series.append(Series(admission, tuple((item["point"]["limit"], item[name]) for item in items)))
            panels.append(Panel(f"{machine}", "most sequences running (concurrency limit)", label, tuple(series)))
    return render_svg("A pool for a quarter of the load, answers of unknown length", panels, columns=3)


def compare_with_real(args: Any) -> int:
    """A smaller load on a server, and again in virtual time."""
    load = Load(num_clients=40, num_requests=200, seed=args.seed)
    return compare(
        "no-collapse",
        recipe_for(load, "predictive", 40, {}),
        lambda world: drive(world, load),
        ("output_tokens_per_s", "ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s"),
        [tenant.name for tenant in TENANTS],
    )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-requests", type=int, default=2100)
    parser.add_argument("--num-clients", type=int, default=128)
    parser.add_argument("--machines", nargs="+", choices=COST_MODELS, default=list(COST_MODELS))
    args = parser.parse_args()
    if args.real:
        return compare_with_real(args)
    load = Load(args.num_clients, args.num_requests, args.seed)
    options = {"num_kv_blocks": load.pool_blocks(), "max_tokens": MAX_TOKENS, "noise": NOISE}
    points = points_of(load, tuple(args.machines))
    document, path = open_document(args, "no-collapse", options)
    run_points(document, path, points, measure, args.jobs)
    path.with_suffix(".svg").write_text(plot(document))
    return tell(document, path, verdicts_of(document))


if __name__ == "__main__":
    sys.exit(main())
