"""Everything a scheduler is made from, as plain values: the one place that turns names into objects.

Two schedulers of one recipe that are told the same at the same times make the same plans; so the recipe is the header
of a decision log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace

from ropeway.core.admission import Admission, OptimisticAdmission, ReserveAdmission
from ropeway.core.batching import Batching, ContinuousBatching, StaticBatching
from ropeway.core.fair_service import VirtualTokenCounters
from ropeway.core.kv_manager import KVManager
from ropeway.core.limits import QueueLimits, SchedulerLimits
from ropeway.core.pacing import FixedTokenBudget, Pacing
from ropeway.core.policy import FirstComeFirstServed, Policy, PriorityOrder, ShortestPrefillFirst
from ropeway.core.predictive_admission import PredictiveAdmission
from ropeway.core.prefix_index import BlockHasher, TokenHasher
from ropeway.core.scheduler import Scheduler
from ropeway.core.step_time import NO_COSTS, StepCosts
from ropeway.core.timed_pacing import Objective, PacingTargets, TimedPacing
from ropeway.core.waiting_line import WaitingLine
from ropeway.errors import ConfigError

Value = str | int | float | bool | None

# Blocks kept free when a request is admitted, so that those running can grow: one in this many.
WATERMARK_DIVISOR = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRecipe:
    """max_num_seqs, max_num_batched_tokens, max_model_len: see `SchedulerLimits`.
    num_kv_blocks, block_size: of each of the num_cache_groups. batching: continuous, static or static-padded.
    admission: of continuous batching; the static ways reserve.
    has_prefix_cache: equal blocks are shared.
    scheduling_policy: vtc, fcfs, priority or spf; priority_aging_s is that of priority. background_share: see
    `WaitingLine`. max_num_queued_x: see `QueueLimits`.
    objective, slo_ttft_s, slo_tpot_s: see `PacingTargets`. step_x_s: the `StepCosts` that pace steps at first; all 0
    for a budget of tokens only. num_layers: the most slices in which the model computes a chunk.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_kv_blocks: int
    block_size: int = 16
    num_cache_groups: int = 1
    batching: str = "continuous"
    has_prefix_cache: bool = False
    scheduling_policy: str = "vtc"
    priority_aging_s: float = 60.0
    background_share: float = 0.05
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    admission: str = "predictive"
    objective: Objective = "balanced"
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    step_fixed_s: float = 0.0
    step_token_s: float = 0.0
    step_later_token_s: float = 0.0
    step_pair_s: float = 0.0
    step_row_s: float = 0.0
    step_read_s: float = 0.0
    num_layers: int = 1

    def with_step_costs(self, costs: StepCosts) -> SchedulerRecipe:
        """The same, with these costs in its fields."""
        return replace(self, **{f"step_{name}": cost for name, cost in asdict(costs).items()})

    def make(self, hasher: BlockHasher | None = None) -> Scheduler:
        """A new scheduler. Raises ConfigError for a value out of range.

        hasher: names the blocks that are shared; None hashes their tokens.
        """
        queue = QueueLimits(self.max_num_queued_reqs, self.max_num_queued_tokens)
        limits = SchedulerLimits(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, queue)
        hasher = (hasher or TokenHasher(self.block_size)) if self.has_prefix_cache else None
        kv = KVManager([self.num_kv_blocks] * self.num_cache_groups, self.block_size, hasher)
        line = WaitingLine(self._policy_maker(), background_share=self.background_share)
        return Scheduler(limits, kv, line=line, batching=self._make_batching(), pacing=self._make_pacing())

    def to_values(self) -> dict[str, Value]:
        """The recipe as a flat mapping, for the header of a decision log."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> SchedulerRecipe:
        """The recipe back from `to_values`. Raises ConfigError for names that are missing or unknown."""
        try:
            return cls(**values)  # type: ignore[arg-type]  # a log of this version holds what to_values wrote
        except TypeError as error:
            raise ConfigError(f"no scheduler can be made from {sorted(values)}: {error}") from error

    def _policy_maker(self) -> Callable[[], Policy]:
        makers: dict[str, Callable[[], Policy]] = {
            "vtc": VirtualTokenCounters,
            "fcfs": FirstComeFirstServed,
            "priority": lambda: PriorityOrder(self.priority_aging_s),
            "spf": ShortestPrefillFirst,
        }
        if self.scheduling_policy not in makers:
            raise ConfigError(f"scheduling_policy must be one of {', '.join(makers)}, not {self.scheduling_policy!r}")
        return makers[self.scheduling_policy]

    def _make_pacing(self) -> Pacing:
        costs = StepCosts(*[getattr(self, f"step_{field.name}") for field in fields(StepCosts)])
        if costs == NO_COSTS:
            if self.slo_ttft_s is not None or self.slo_tpot_s is not None:
                raise ConfigError("latency targets need step_x_s: the costs of a step")
            return FixedTokenBudget(self.max_num_batched_tokens)
        targets = PacingTargets(
            max_num_tokens=self.max_num_batched_tokens,
            objective=self.objective,
            ttft_s=self.slo_ttft_s,
            tpot_s=self.slo_tpot_s,
        )
        return TimedPacing(targets, costs, self.num_layers)

    def _make_admission(self) -> Admission:
        match self.admission:
            case "predictive":
                return PredictiveAdmission()
            case "reserve":
                return ReserveAdmission()
            case "optimistic":
                return OptimisticAdmission(self.num_kv_blocks // WATERMARK_DIVISOR)
        raise ConfigError(f"admission must be predictive, reserve or optimistic, not {self.admission!r}")

    def _make_batching(self) -> Batching:
        match self.batching:
            case "continuous":
                return ContinuousBatching(self._make_admission())
            case "static" | "static-padded":
                return StaticBatching(is_padded=self.batching == "static-padded")
        raise ConfigError(f"batching must be continuous, static or static-padded, not {self.batching!r}")
