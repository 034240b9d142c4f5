"""Every policy and every admission by name, for what tries them all."""

from __future__ import annotations

from collections.abc import Callable

from ropeway.core.admission import Admission, OptimisticAdmission, ReserveAdmission
from ropeway.core.fair_service import VirtualTokenCounters
from ropeway.core.policy import FirstComeFirstServed, Policy, PriorityOrder, ShortestPrefillFirst
from ropeway.core.predictive_admission import PredictiveAdmission

POLICIES: dict[str, Callable[[], Policy]] = {
    "vtc": VirtualTokenCounters,
    "fcfs": FirstComeFirstServed,
    "priority": lambda: PriorityOrder(2.0),
    "priority, strict": lambda: PriorityOrder(0.0),
    "spf": ShortestPrefillFirst,
}
ADMISSIONS: dict[str, Callable[[], Admission]] = {
    "optimistic": OptimisticAdmission,
    "optimistic, watermark": lambda: OptimisticAdmission(2),
    "reserve": ReserveAdmission,
    "predictive": PredictiveAdmission,
}
