"""How long answers are going to be, learned from those before: overall and per tenant, forgetting old traffic.

Knows no memory and no queues. Plain floats: the same observations in the same order give the same expectations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from operator import mul

# Lengths are told apart by their bin: single tokens at first, then four bins an octave.
EDGES: tuple[int, ...] = tuple(sorted({*range(8), *(round(8 * 2.0 ** (i / 4)) for i in range(84))}))
NUM_BINS = len(EDGES)
# Horizons, in tokens from now, at which survival is asked: two an octave.
HORIZONS: tuple[int, ...] = tuple(sorted({1, 2, 4, *(round(8 * 2.0 ** (i / 2)) for i in range(28))}))

WINDOW = 128  # exposures of a bin that are remembered
PRIOR_HAZARD = 0.05  # per bin, before anything was seen: nearly as cautious as to expect max_tokens
PRIOR_HAZARDS = (PRIOR_HAZARD,) * NUM_BINS
PRIOR_EXPOSURE = 1.0
TENANT_EXPOSURE = 8.0  # of the overall hazard, that a tenant's own is mixed with
NEGLIGIBLE_SHARE = 1e-3
MAX_NUM_TENANTS = 256
REFRESH_SHARE = 4  # expectations are worked out anew after one observation in so many of the window


def bin_of(num_generated: float) -> int:
    """The bin of a length: EDGES[bin] <= num_generated < EDGES[bin + 1]."""
    return bisect_right(EDGES, num_generated) - 1


class _Hazards:
    """Per bin, how many answers that reached it ended in it.

    An answer that runs, was cut off or left counts for the bins it has passed (Kaplan and Meier, 1958), so lengths that
    suddenly grow are noticed while the long answers still run. Each bin forgets on its own count of exposures.
    """

    def __init__(self) -> None:
        self.exposures = [0.0] * NUM_BINS
        self.ends = [0.0] * NUM_BINS
        self.num_observed = 0
        self._alone: list[float] | None = None  # hazards of these alone, until something more is observed
        self._shares: dict[int, tuple[float, ...]] = {}
        self._survivals: list[float] = []  # to the lower edge of each bin
        self._changes: list[float] = []  # of survival, within each bin
        self._worked_out_at = 0

    def observe(self, first_bin: int, last_bin: int, has_ended: bool) -> None:
        """An answer passed the bins from first_bin on, and ended in last_bin or has only reached it."""
        keep = 1.0 - 1.0 / WINDOW
        exposures, ends = self.exposures, self.ends
        for i in range(first_bin, last_bin + has_ended):
            exposures[i] = exposures[i] * keep + 1.0
            ends[i] *= keep
        if has_ended:
            ends[last_bin] += 1.0
        self.num_observed += 1
        self._alone = None

    def shares(self, begin_bin: int, overall: _Hazards | None) -> tuple[float, ...]:
        """Of answers within begin_bin, what share is expected to run still after each of HORIZONS.

        Ends where the share is below NEGLIGIBLE_SHARE.
        """
        if self.num_observed >= self._worked_out_at + min(WINDOW // REFRESH_SHARE, 1 + self.num_observed // 16):
            self._shares.clear()
            self._worked_out_at = self.num_observed
        shares = self._shares.get(begin_bin)
        if shares is None:
            if not self._shares:
                self._work_out(self.alone() if overall is None else self._mixed(overall.alone(), TENANT_EXPOSURE))
            shares = self._shares[begin_bin] = self._conditional(begin_bin)
        return shares

    def alone(self) -> list[float]:
        """Per bin, the share of those reaching it who end in it. Every tenant's are mixed with the overall ones."""
        if self._alone is None:
            self._alone = self._mixed(PRIOR_HAZARDS, PRIOR_EXPOSURE)
        return self._alone

    def _mixed(self, priors: Sequence[float], weight: float) -> list[float]:
        """Hazards, where `weight` exposures with the prior hazards were seen before."""
        columns = zip(self.ends, self.exposures, priors, strict=True)
        return [(ends + weight * prior) / (exposures + weight) for ends, exposures, prior in columns]

    def _work_out(self, hazards: list[float]) -> None:
        """Survival by these hazards; behind the last bin it stays what it is there."""
        survivals = list(accumulate([1.0 - hazard for hazard in hazards], mul, initial=1.0))
        self._changes = [*[after - before for before, after in pairwise(survivals)], 0.0]
        self._survivals = survivals

    def _conditional(self, begin_bin: int) -> tuple[float, ...]:
        survivals, changes = self._survivals, self._changes
        (i, passed), places = _places(begin_bin)
        base = survivals[i] + changes[i] * passed
        shares: list[float] = []
        if base <= 0.0:
            return ()
        for i, passed in places:
            share = (survivals[i] + changes[i] * passed) / base
            if share < NEGLIGIBLE_SHARE:
                break
            shares.append(share if share < 1.0 else 1.0)
        return tuple(shares)


@cache
def _places(begin_bin: int) -> tuple[tuple[int, float], tuple[tuple[int, float], ...]]:
    """Where the middle of a bin lies, and each horizon from there: in which bin, and what share of that is passed."""
    begin = (EDGES[begin_bin] + EDGES[min(begin_bin + 1, NUM_BINS - 1)] - 1) / 2
    places = []
    for length in (begin, *[begin + horizon for horizon in HORIZONS]):
        i = bin_of(length)
        is_last = i + 1 >= NUM_BINS
        places.append((NUM_BINS, 0.0) if is_last else (i, (length - EDGES[i]) / (EDGES[i + 1] - EDGES[i])))
    return places[0], tuple(places[1:])


class AnswerLengths:
    """Hazards of all answers together, and of each of the MAX_NUM_TENANTS tenants seen last."""

    def __init__(self) -> None:
        self._overall = _Hazards()
        self._tenants: dict[str, _Hazards] = {}  # in the order they were seen last

    def observe(self, tenant: str, first_bin: int, last_bin: int, has_ended: bool) -> None:
        """An answer passed the bins from first_bin on, and ended in last_bin, or has only reached it."""
        self._overall.observe(first_bin, last_bin, has_ended)
        hazards = self._tenants.pop(tenant, None) or _Hazards()
        self._tenants[tenant] = hazards
        hazards.observe(first_bin, last_bin, has_ended)
        if len(self._tenants) > MAX_NUM_TENANTS:
            del self._tenants[next(iter(self._tenants))]

    def shares(self, tenant: str, begin_bin: int) -> tuple[float, ...]:
        """Of this tenant's answers within begin_bin, what share is expected to run still after each of HORIZONS."""
        hazards = self._tenants.get(tenant)
        if hazards is None:
            return self._overall.shares(begin_bin, None)
        return hazards.shares(begin_bin, self._overall)
