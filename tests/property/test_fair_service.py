"""The theorem of virtual token counters (Sheng et al., OSDI 2024, theorem 4.4), held against what plans compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ropeway.core.fair_service import DECODE_COST, PREFILL_COST, VirtualTokenCounters
from ropeway.core.params import ServiceTerms
from ropeway.core.policy import FirstComeFirstServed, Policy
from ropeway.core.sequence import Sequence
from ropeway.core.waiting_line import WaitingLine
from support.scheduling import make_request, make_scheduler, run_step
from support.stand_in import PolicyStandIn

NUM_STEPS = 150
LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8)


class WithoutPreemption(PolicyStandIn):
    """The theorem is of a server where nobody makes way."""

    def __init__(self) -> None:
        super().__init__(VirtualTokenCounters())

    def victims_for(self, newcomer: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        return []


@dataclass
class Gap:
    """What two tenants were served, per weight: the most it moved apart over any interval, and the theorem's bound."""

    widest: float
    bound: float


def measure(
    make_policy: Callable[[], Policy],
    lengths: dict[str, list[tuple[int, int]]],
    *,
    weights: dict[str, float],
    num_first: dict[str, int],
    budget: int,
    max_num_seqs: int,
) -> Gap:
    """Tenants a and b always have sequences waiting; memory is ample, so nobody is preempted for it.

    num_first: how many of each come at the start, a's before b's.
    """
    scheduler = make_scheduler(
        line=WaitingLine(make_policy), num_blocks=4000, block_size=4, budget=budget, max_num_seqs=max_num_seqs
    )
    numbers = count()
    num_waiting: Counter[str] = Counter()
    served = {"a": 0.0, "b": 0.0}

    def add(tenant: str) -> None:
        number = next(numbers)
        shape = lengths[tenant][number % len(lengths[tenant])]
        terms = ServiceTerms(tenant=tenant, weight=weights.get(tenant, 1.0))
        scheduler.add(make_request(f"{tenant}{number}", *shape, stop=False, terms=terms), 0.0)
        num_waiting[tenant] += 1

    for tenant in "ab":
        for _ in range(num_first[tenant]):
            add(tenant)
    differences, most_running = [0.0], 0
    for _ in range(NUM_STEPS):
        sequences = dict(scheduler._roster.sequences)
        plan, _ = run_step(scheduler)
        for name in scheduler.take_started_ids():
            num_waiting[name[0]] -= 1
            while num_waiting[name[0]] <= max_num_seqs:  # more than one step can take
                add(name[0])
        running = scheduler._roster.running.values()
        most_running = max(most_running, sum(s.num_tokens for s in running))
        for row, sequence_id in enumerate(plan.sequence_ids):
            sequence = sequences[sequence_id]
            is_prompt = plan.starts[row] < sequence.num_prompt_tokens
            cost = plan.num_tokens[row] * (PREFILL_COST if is_prompt else DECODE_COST)
            tenant = sequence.request.terms.tenant
            served[tenant] += cost / weights.get(tenant, 1.0)
        differences.append(served["a"] - served["b"])
    assert scheduler.stats().num_recomputed_tokens == 0
    longest_prompt = max(prompt for shapes in lengths.values() for prompt, _ in shapes)
    bound = (
        2
        * max(PREFILL_COST * longest_prompt, DECODE_COST * most_running)
        / min(weights.get(tenant, 1.0) for tenant in "ab")
    )
    return Gap(max(differences) - min(differences), bound)


@given(
    lengths=st.fixed_dictionaries({"a": LENGTHS, "b": LENGTHS}),
    weight=st.sampled_from([1.0, 1.0, 2.0, 0.5]),
    num_first=st.fixed_dictionaries({"a": st.integers(5, 60), "b": st.integers(5, 10)}),
    budget=st.integers(4, 60),
    max_num_seqs=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_two_tenants_that_wait_are_never_further_apart_than_the_theorem_says(
    lengths: dict[str, list[tuple[int, int]]],
    weight: float,
    num_first: dict[str, int],
    budget: int,
    max_num_seqs: int,
) -> None:
    weights = {"b": weight}
    gap = measure(
        WithoutPreemption,
        lengths,
        weights=weights,
        num_first=num_first,
        budget=budget,
        max_num_seqs=max_num_seqs,
    )
    assert gap.widest <= gap.bound, gap


def test_first_come_first_served_breaks_it() -> None:
    shape: dict[str, list[tuple[int, int]]] = {"a": [(20, 10)], "b": [(20, 10)]}
    gaps = [
        measure(make, shape, weights={}, num_first={"a": 60, "b": 3}, budget=32, max_num_seqs=2)
        for make in (FirstComeFirstServed, WithoutPreemption)
    ]
    assert gaps[0].widest > 3 * gaps[0].bound and gaps[1].widest <= gaps[1].bound, gaps
