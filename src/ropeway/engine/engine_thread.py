"""The engine on a thread of its own. Knows threads; knows no event loop, text or HTTP.

`EngineThread` owns an `Engine`: only its thread touches it. Messages reach it through an inbox, from any thread;
whatever a turn brings leaves as one `StepNews`. A message sent before a step ends is obeyed before the next step is
planned.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropeway.core.params import Request
from ropeway.core.plan import SequenceEvent
from ropeway.engine.engine import Engine
from ropeway.engine.target_log import TargetLog
from ropeway.engine.utilization import CallMeter, Utilization
from ropeway.errors import RopewayError

logger = logging.getLogger(__name__)

# The engine's bookkeeping is checked when it falls idle, at most this often: whoever comes just then waits for it.
IDLE_CHECK_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Message = _Submit | _Abort | _Stop | _Close


@dataclass(frozen=True, slots=True)
class StepNews:
    """Everything one turn of the engine thread brought. now_s: time.monotonic() at its end.

    accepted_ids: requests the engine took; started_ids: that computed for the first time; rejected: that it would not
    take, with the reason.
    failure: the engine is broken; nothing follows.
    """

    now_s: float
    events: Sequence[SequenceEvent] = ()
    accepted_ids: Sequence[str] = ()
    started_ids: Sequence[str] = ()
    rejected: Sequence[tuple[str, RopewayError]] = ()
    failure: BaseException | None = None


class EngineThread:
    """Runs an Engine on a thread of its own. Every method may be called from any thread.

    deliver: called on the engine thread with each news; it must not block.
    stats, last_step_s: as of the end of the last turn, and when that was (time.monotonic()).
    has_failed_last: the newest step could not be computed.
    utilization: None where the backend does not count.
    """

    def __init__(self, engine: Engine, deliver: Callable[[StepNews], None], meter: CallMeter | None = None) -> None:
        self._engine = engine
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ropeway-engine", daemon=True)
        self.stats = engine.stats()
        self.has_failed_last = False
        self._next_check_s = 0.0
        self._target_log = TargetLog()
        self.last_step_s = time.monotonic()
        self.utilization = None if meter is None else Utilization(meter, self.last_step_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._inbox.put(_Submit(request))

    def abort(self, request_id: str) -> None:
        """Ends a request with `abort`; nothing happens where it has ended already."""
        self._inbox.put(_Abort(request_id))

    def stop(self, request_id: str, index: int) -> None:
        """The text side found a stop string in this sequence."""
        self._inbox.put(_Stop(request_id, index))

    def close(self) -> None:
        """Ends the thread once it has obeyed what was sent before. Requests still open then get no further event."""
        self._inbox.put(_Close())

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within timeout_s."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as failure:
            logger.exception("the engine failed and has stopped")
            self._deliver(StepNews(time.monotonic(), failure=failure))

    def _turn(self) -> bool:
        """Obeys the inbox, runs one step, reports. False when told to close."""
        engine = self._engine
        events: list[SequenceEvent] = []
        accepted_ids: list[str] = []
        rejected: list[tuple[str, RopewayError]] = []
        start_s = time.monotonic() if engine.has_work else None  # else the inbox is where the thread sleeps
        is_open = self._obey_inbox(events, accepted_ids, rejected)
        if start_s is None:
            start_s = time.monotonic()
        started: Sequence[str] = ()
        has_stepped = is_open and engine.has_work
        if has_stepped:
            events += engine.step()
            started = engine.take_started_ids()
        now_s = time.monotonic()
        stats = engine.stats()
        if stats.num_steps != self.stats.num_steps:
            self.has_failed_last = stats.num_failed_steps != self.stats.num_failed_steps
        self.stats = stats
        if stats.pacing is not None:
            self._target_log.observe(stats.pacing)
        self.last_step_s = now_s
        if events or accepted_ids or rejected or started:
            self._deliver(StepNews(now_s, events, accepted_ids, started, rejected))
        if has_stepped and not engine.has_work and now_s >= self._next_check_s and self._inbox.empty():
            engine.check_invariants()
            self._next_check_s = now_s + IDLE_CHECK_INTERVAL_S
        if has_stepped and self.utilization is not None:
            end_s = time.monotonic()
            self.utilization.on_turn(end_s - start_s, stats.num_running, end_s)
        return is_open

    def _obey_inbox(
        self, events: list[SequenceEvent], accepted_ids: list[str], rejected: list[tuple[str, RopewayError]]
    ) -> bool:
        engine, inbox = self._engine, self._inbox
        is_blocking = not engine.has_work
        while True:
            try:
                message = inbox.get(block=is_blocking)
            except queue.Empty:
                return True
            is_blocking = False
            match message:
                case _Submit(request):
                    try:
                        engine.submit(request)
                    except RopewayError as error:
                        rejected.append((request.request_id, error))
                    else:
                        accepted_ids.append(request.request_id)
                case _Abort(request_id):
                    events += engine.abort(request_id)
                case _Stop(request_id, index):
                    events += engine.stop(request_id, index)
                case _Close():
                    return False
