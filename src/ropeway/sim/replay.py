"""Rebuilds a schedule from its decision log: a real scheduler is told what the log says, and must choose what it says.

Tokens are not in a log, so all are 0; who ended early is told by its id. Knows no files and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from ropeway.core.decision_log import (
    AbortRecord,
    AddRecord,
    CommitRecord,
    DecisionLog,
    FailRecord,
    LogEncoder,
    PlanRecord,
    Record,
    StopRecord,
)
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.plan import StepPlan, StepResult
from ropeway.core.recipe import SchedulerRecipe
from ropeway.core.stats import EngineStats

_TOKEN_ID, _STOP_TOKEN_ID = 0, 1  # nobody draws the latter


class _RepeatedHasher:
    """Gives out recorded digests as hashes, in the order in which they were given out then."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._digests: deque[bytes] = deque()

    def load(self, digests: Sequence[bytes]) -> None:
        """What is to be given out during the next call of the scheduler; everything before was."""
        if self._digests:
            raise ReplayDifference(f"the scheduler asked for {len(self._digests)} block hashes fewer than the log has")
        self._digests.extend(digests)

    def prompt_hashes(self, request: Request) -> list[bytes]:
        return [self._next() for _ in range(len(request.prompt_token_ids) // self._block_size)]

    def next_hash(self, request: Request, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        return self._next()

    def _next(self) -> bytes:
        if not self._digests:
            raise ReplayDifference("the scheduler asked for a block hash that the log does not have")
        return self._digests.popleft()


class ReplayDifference(Exception):
    """The scheduler chose something else than the log says. The message tells the step and what differs first."""


@dataclass(frozen=True, slots=True)
class ReplayedRecord:
    """A record that was replayed, and the scheduler's counters after it, where it is a plan."""

    record: Record
    stats: EngineStats | None


class Replay:
    """One pass over a log with a scheduler made from its header.

    Raises ConfigError where the header makes no scheduler.
    """

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        recipe = SchedulerRecipe.from_values(log.header)
        self._hasher = _RepeatedHasher(recipe.block_size)
        self._scheduler = recipe.make(self._hasher)
        self._encoder = LogEncoder()
        self._num_requests = 0
        self._in_flight: StepPlan | None = None

    @property
    def cut_at(self) -> int | None:
        """Where the log was cut off, once it has been replayed up to there."""
        return self._log.cut_at

    def run(self) -> Iterator[ReplayedRecord]:
        """Replays record by record; each yielded one is identical to what the log says, byte for byte.

        Raises ReplayDifference at the first that is not, DecisionLogError where the log is damaged.
        """
        for record, data in self._log.entries():
            rebuilt = self._rebuild(record)
            if rebuilt != record or self._encoder.encode(rebuilt) != data:
                raise ReplayDifference(_difference(record, rebuilt))
            yield ReplayedRecord(record, self._scheduler.stats() if isinstance(record, PlanRecord) else None)

    def stats(self) -> EngineStats:
        """The scheduler's counters."""
        return self._scheduler.stats()

    def _rebuild(self, record: Record) -> Record:
        """Tells the scheduler the inputs in a record; the record with what it chose itself."""
        scheduler = self._scheduler
        if isinstance(record, AddRecord | PlanRecord | CommitRecord):
            self._hasher.load(record.digests)
        match record:
            case AddRecord():
                scheduler.add(_request(record, self._num_requests), record.now_s)
                self._num_requests += 1
            case AbortRecord():
                scheduler.abort(str(record.request_number))
            case StopRecord():
                scheduler.stop(str(record.request_number), record.index)
            case PlanRecord():
                scheduler.expire(record.now_s)
                self._in_flight = scheduler.plan(record.now_s)
                return PlanRecord(record.now_s, self._in_flight, record.digests)
            case CommitRecord():
                plan = self._take_in_flight()
                scheduler.commit(plan, _result(plan, record), record.now_s)
            case FailRecord():
                scheduler.fail(self._take_in_flight(), record.now_s)
        return record

    def _take_in_flight(self) -> StepPlan:
        plan, self._in_flight = self._in_flight, None
        if plan is None:
            raise ReplayDifference("the log says that a step was computed where none was in flight")
        return plan


def _request(record: AddRecord, number: int) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=(_TOKEN_ID,) * record.num_prompt_tokens,
        params=SamplingParams(n=record.num_sequences, max_tokens=record.max_tokens),
        max_tokens=record.max_tokens,
        seed=0,
        stop_token_ids=frozenset({_STOP_TOKEN_ID} if record.may_end_early else ()),
        terms=ServiceTerms(
            tenant=record.tenant,
            weight=record.weight,
            user=record.user or None,
            priority=record.priority,
            is_background=record.is_background,
            timeout_s=record.timeout_s,
            queue_timeout_s=record.queue_timeout_s,
        ),
        skips_prefix_cache=record.skips_prefix_cache,
    )


def _result(plan: StepPlan, record: CommitRecord) -> StepResult:
    sampled_ids = tuple([i for i in compress(plan.sequence_ids, plan.is_sampled) if i not in record.failed_ids])
    token_ids = (_TOKEN_ID,) * len(sampled_ids)
    return StepResult(plan.step_id, sampled_ids, token_ids, record.failed_ids, record.stopped_ids)


def _difference(recorded: Record, rebuilt: Record) -> str:
    assert isinstance(recorded, PlanRecord) and isinstance(rebuilt, PlanRecord), "inputs are what the log says"
    there, here = recorded.plan, rebuilt.plan
    if there is None or here is None:
        step = f"at {recorded.now_s:.6f} s" if there is None else f"in step {there.step_id}"
        return f"{step} the log has {_a_plan(there)} and the replay {_a_plan(here)}"
    for name, was, now in zip(StepPlan._fields, there, here, strict=True):
        if was != now:
            return f"step {there.step_id} differs in {name}: {_shortened(was)} in the log, {_shortened(now)} here"
    return f"step {there.step_id} differs in its bytes: the log was written by another encoder"


def _a_plan(plan: StepPlan | None) -> str:
    return "nothing to compute" if plan is None else f"a plan of {plan.num_rows} rows"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
