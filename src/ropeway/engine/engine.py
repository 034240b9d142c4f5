"""One step = plan → compute → commit. Knows token ids only: no text, clock, threads or HTTP.

Not thread-safe: one caller at a time. When a step cannot be computed, its sequences end as `error`, every other request
goes on, and so does the engine; `EngineStats.num_failed_steps` and the log tell of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from ropeway.core.limits import QueueLimits
from ropeway.core.params import Request
from ropeway.core.plan import SequenceEvent, StepPlan, StepResult
from ropeway.core.scheduler import Scheduler
from ropeway.core.stats import EngineStats, SequenceProgress
from ropeway.engine.decision_recorder import DecisionRecorder

__all__ = ["Engine", "EngineStats", "StepRunner"]

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """Computes plans, one at a time: `launch`, then `collect`.

    After an exception from either, the next call is a `launch`, of a plan without the sequences of the failed one.
    """

    def add(self, sequence_id: int, request: Request, index: int) -> None: ...

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...


class Engine:
    """A scheduler and the runner it drives.

    clock: seconds, never going back; read at every arrival, before every plan and after every result.
    recorder: is told everything that the scheduler is told, and what it chose.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Callable[[], float],
        recorder: DecisionRecorder | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._recorder = recorder
        self.has_failed_last = False  # the newest step could not be computed

    @property
    def num_running(self) -> int:
        """Sequences that hold memory."""
        return self._scheduler.num_running

    @property
    def has_work(self) -> bool:
        """Whether an accepted request is unfinished, so that `step` has something to do."""
        return self._scheduler.has_work

    @property
    def may_board(self) -> bool:
        """Whether a sequence that arrived now would find a place, and nobody before it in line."""
        return self._scheduler.may_board

    def is_open(self, request_id: str) -> bool:
        """Whether a request has an unfinished sequence."""
        return self._scheduler.is_open(request_id)

    @property
    def max_model_len(self) -> int:
        """The effective context: the most prompt + max_tokens that is accepted."""
        return self._scheduler.max_model_len

    @property
    def queue_limits(self) -> QueueLimits:
        """How much may wait to begin."""
        return self._scheduler.queue_limits

    def submit(self, request: Request) -> None:
        """Accept a request; each of its n sequences will end in exactly one terminal event.

        Raises InvalidRequestError for an empty prompt or a request_id in use, RequestTooLargeError for what never fits,
        OverloadedError where too much waits already; then nothing was started.
        """
        now_s = self._clock()
        sequences = self._scheduler.add(request, now_s)
        if self._recorder is not None:
            self._recorder.on_added(request, sequences[0].sequence_id, now_s)
        try:
            for sequence in sequences:
                self._runner.add(sequence.sequence_id, request, sequence.index)
        except BaseException:
            self.abort(request.request_id)  # nobody was promised these events
            raise

    def abort(self, request_id: str) -> list[SequenceEvent]:
        """End what is unfinished of a request and free its blocks now; its terminal events. Empty if it has ended."""
        events = self._scheduler.abort(request_id)
        if self._recorder is not None:
            self._recorder.on_aborted(request_id, events)
        return events

    def stop(self, request_id: str, index: int) -> list[SequenceEvent]:
        """End one sequence as `stop`, because its text ended; its terminal event. Empty if it has ended."""
        events = self._scheduler.stop(request_id, index)
        if self._recorder is not None:
            self._recorder.on_stopped(request_id, index, events)
        return events

    def step(self) -> list[SequenceEvent]:
        """Compute one step; the news of every sequence that got a token or ended. Empty when there is nothing to do."""
        now_s = self._clock()
        expired = self._scheduler.expire(now_s)
        if expired and self._recorder is not None:
            self._recorder.on_expired(expired)
        plan = self._plan(now_s)
        if plan is None:
            return expired
        try:
            self._runner.launch(plan)
            result = self._runner.collect()
        except Exception:
            logger.exception("step %d failed; its %d sequences end as errors", plan.step_id, plan.num_rows)
            return expired + self._fail(plan)
        self.has_failed_last = False
        now_s = self._clock()
        events = self._scheduler.commit(plan, result, now_s)
        if self._recorder is not None:
            self._recorder.on_committed(result, events, now_s)
        return expired + events if expired else events

    def _plan(self, now_s: float) -> StepPlan | None:
        plan = self._scheduler.plan(now_s)
        if self._recorder is not None:
            self._recorder.on_planned(plan, now_s)
        return plan

    def _fail(self, plan: StepPlan) -> list[SequenceEvent]:
        self.has_failed_last = True
        now_s = self._clock()
        events = self._scheduler.fail(plan, now_s)
        if self._recorder is not None:
            self._recorder.on_failed(events, now_s)
        return events

    def expire(self) -> list[SequenceEvent]:
        """End the requests that are out of time, without a step; their terminal events. To a log they are aborted."""
        events = self._scheduler.expire(self._clock())
        if self._recorder is not None:
            for request_id in dict.fromkeys([event.request_id for event in events]):
                self._recorder.on_aborted(request_id, [e for e in events if e.request_id == request_id])
        return events

    def progress(self, request_id: str) -> tuple[SequenceProgress, ...]:
        """Where each sequence of a request is; empty for an id not in use."""
        return self._scheduler.progress(request_id)

    def check_invariants(self) -> None:
        """Check that every sequence is in its one place and every block accounted for; 3 ms for 8,000 blocks.

        Raises AssertionError with the first violation.
        """
        self._scheduler.check_invariants()

    def take_started_ids(self) -> list[str]:
        """The requests that boarded for the first time in the last step, once."""
        return self._scheduler.take_started_ids()

    def stats(self) -> EngineStats:
        """Gauges of now, and counters since the start."""
        return self._scheduler.stats()
