"""A short form of `make evidence-exhaustive`: every policy and admission, one kind of arrival, every order of calls."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ropeway.core.admission import OptimisticAdmission
from ropeway.core.policy import FirstComeFirstServed
from ropeway.core.sequence import Sequence
from support.exhaustive import Arrival, Walk, walk
from support.schedulers import ADMISSIONS, POLICIES
from support.stand_in import PolicyStandIn, StandIn


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_state_is_sound_and_every_path_ends(policy: str, admission: str) -> None:
    what = Walk(POLICIES[policy], ADMISSIONS[admission], (Arrival(5, 2),), max_num_seqs=2, can_fail=policy == "fcfs")
    coverage = walk(what)
    assert coverage.num_states > 50 and coverage.num_ends >= 1


@pytest.mark.parametrize("policy", ["fcfs", "vtc"])
def test_waves_end_whatever_becomes_of_their_sequences(policy: str) -> None:
    what = Walk(POLICIES[policy], OptimisticAdmission, (Arrival(5, 2),), max_num_seqs=2, makes_waves=True)
    coverage = walk(what)
    assert coverage.num_states > 50 and coverage.num_ends >= 1


class Leaking(StandIn):
    """Keeps a block of whoever is aborted; else as OptimisticAdmission."""

    def __init__(self) -> None:
        super().__init__(OptimisticAdmission())

    def on_finished(self, sequence: Sequence) -> None:
        if sequence.finish_reason == "abort" and sequence.block_ids:
            sequence.block_ids[0].pop()


def test_the_walk_sees_a_leak() -> None:
    with pytest.raises(AssertionError, match="holders of a block are miscounted"):
        walk(Walk(POLICIES["fcfs"], Leaking, (Arrival(5, 2),)))


class Yielding(PolicyStandIn):
    """Whoever runs makes way for whoever waits, and so on; else as FirstComeFirstServed."""

    def __init__(self) -> None:
        super().__init__(FirstComeFirstServed())

    def victims_for(self, newcomer: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        return list(running)


def test_the_walk_sees_a_livelock() -> None:
    with pytest.raises(AssertionError, match="livelock"):
        walk(Walk(Yielding, OptimisticAdmission, (Arrival(7, 2),), max_num_seqs=1))
