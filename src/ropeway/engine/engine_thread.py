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
from ropeway.core.stats import SequenceProgress
from ropeway.engine.engine import Engine
from ropeway.engine.follow_ups import FollowUps
from ropeway.engine.target_log import TargetLog
from ropeway.engine.utilization import CallMeter, Utilization
from ropeway.errors import RopewayError

logger = logging.getLogger(__name__)

# The engine's bookkeeping is checked when it falls idle, at most this often: whoever comes just then waits for it.
IDLE_CHECK_INTERVAL_S = 10.0
# Where nobody comes or ends, what is counted is looked up at most this often: it costs as much as planning a decode.
STATS_INTERVAL_S = 0.1
# While paused, requests that run out of time are ended so often.
PAUSED_CHECK_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    sent_s: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class _Pause:
    is_paused: bool


@dataclass(frozen=True, slots=True)
class _Describe:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Message = _Submit | _Abort | _Stop | _Pause | _Describe | _Close


@dataclass(frozen=True, slots=True)
class StepNews:
    """Everything one turn of the engine thread brought. now_s, step_start_s: time.monotonic() at its end, and before
    its step.

    progress: of the requests that were asked about.
    accepted_ids: requests the engine took; started_ids: that computed for the first time; rejected: that it would not
    take, with the reason.
    failure: the engine is broken; nothing follows.
    """

    now_s: float
    step_start_s: float = 0.0
    events: Sequence[SequenceEvent] = ()
    accepted_ids: Sequence[str] = ()
    started_ids: Sequence[str] = ()
    rejected: Sequence[tuple[str, RopewayError]] = ()
    progress: Sequence[tuple[str, Sequence[SequenceProgress]]] = ()
    failure: BaseException | None = None


class EngineThread:
    """Runs an Engine on a thread of its own. Every method may be called from any thread.

    deliver: called on the engine thread with each news; it must not block.
    stats: as of the end of the last turn in which a request came, started or ended, or of a later one of the last
    STATS_INTERVAL_S. last_step_s: when the last turn ended (time.monotonic()).
    has_failed_last: the newest step could not be computed.
    utilization: None where the backend does not count. held_s: for which steps were held for requests to come, in all.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[StepNews], None],
        meter: CallMeter | None = None,
        follow_ups: FollowUps | None = None,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._follow_ups = follow_ups or FollowUps()
        self.held_s = 0.0
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ropeway-engine", daemon=True)
        self.stats = engine.stats()
        self._next_stats_s = 0.0
        self.has_failed_last = False
        self._next_check_s = 0.0
        self._is_paused = False
        self._target_log = TargetLog()
        self.last_step_s = time.monotonic()
        self.utilization = None if meter is None else Utilization(meter, self.last_step_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._inbox.put(_Submit(request, time.monotonic()))

    def abort(self, request_id: str) -> None:
        """Ends a request with `abort`; nothing happens where it has ended already."""
        self._inbox.put(_Abort(request_id))

    def stop(self, request_id: str, index: int) -> None:
        """The text side found a stop string in this sequence."""
        self._inbox.put(_Stop(request_id, index))

    def pause(self, is_paused: bool) -> None:
        """Plans nothing from the next step on, or goes on. Requests are taken, aborted and timed out meanwhile."""
        self._inbox.put(_Pause(is_paused))

    def describe(self, request_id: str) -> None:
        """Asks for the progress of a request, which comes with the next news."""
        self._inbox.put(_Describe(request_id))

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
        orders = _Orders()
        had_work, start_s, held_before_s = self._may_step, time.monotonic(), self.held_s
        is_open = self._obey_inbox(orders)
        # Where there was no work, the inbox is where the thread slept.
        start_s = start_s + self.held_s - held_before_s if had_work else time.monotonic()
        events, has_orders = orders.events, orders.has_any
        started: Sequence[str] = ()
        ended: list[SequenceEvent] = []
        has_stepped, step_start_s = is_open and self._may_step, time.monotonic()
        if has_stepped:
            stepped = engine.step()
            started = engine.take_started_ids()
            ended = [event for event in stepped if event.finish_reason is not None]
            events += stepped
        elif self._is_paused:
            events += engine.expire()
        now_s = time.monotonic()
        self.has_failed_last = engine.has_failed_last
        self.last_step_s = now_s
        if has_orders or started or ended or not has_stepped or now_s >= self._next_stats_s:
            self._take_stats(now_s)
        if events or started or orders.has_news:
            told = (events, orders.accepted_ids, started, orders.rejected, orders.progress)
            self._deliver(StepNews(now_s, step_start_s, *told))
        if ended and engine.has_work and engine.may_board:
            num_ended = sum([not engine.is_open(request_id) for request_id in {event.request_id for event in ended}])
            self._follow_ups.on_step(num_ended, now_s - step_start_s, now_s)
        if has_stepped and not engine.has_work and now_s >= self._next_check_s and self._inbox.empty():
            engine.check_invariants()
            self._next_check_s = now_s + IDLE_CHECK_INTERVAL_S
        if has_stepped and self.utilization is not None:
            end_s = time.monotonic()
            self.utilization.on_turn(end_s - start_s, engine.num_running, end_s)
        return is_open

    def _take_stats(self, now_s: float) -> None:
        self.stats = stats = self._engine.stats()
        self._next_stats_s = now_s + STATS_INTERVAL_S
        if stats.pacing is not None:
            self._target_log.observe(stats.pacing)

    @property
    def _may_step(self) -> bool:
        return self._engine.has_work and not self._is_paused

    def _obey_inbox(self, orders: _Orders) -> bool:
        """Obeys what is there and what comes while the next step is held; sleeps where there is nothing to do.

        False when told to close.
        """
        message = self._next_message() if self._may_step else self._first_message()
        while message is not None:
            if isinstance(message, _Close):
                return False
            self._obey(message, orders)
            message = self._next_message()
        return True

    def _first_message(self) -> _Message | None:
        """Sleeps until there is one; None where requests that must not run may be out of time."""
        try:
            return self._inbox.get(timeout=PAUSED_CHECK_INTERVAL_S if self._engine.has_work else None)
        except queue.Empty:
            return None

    def _next_message(self) -> _Message | None:
        """One that is there, or comes while the next step is held."""
        while (hold_s := self._follow_ups.left_s(before_s := time.monotonic())) > 0.0:
            try:
                return self._inbox.get(timeout=hold_s)
            except queue.Empty:
                pass
            finally:
                self.held_s += time.monotonic() - before_s
        return None if self._inbox.empty() else self._inbox.get_nowait()

    def _obey(self, message: _Submit | _Abort | _Stop | _Pause | _Describe, orders: _Orders) -> None:
        engine = self._engine
        match message:
            case _Submit(request, sent_s):
                self._follow_ups.on_arrival(sent_s)
                try:
                    engine.submit(request)
                except RopewayError as error:
                    # Without its frames, which hold the orders, and so the error itself.
                    orders.rejected.append((request.request_id, error.with_traceback(None)))
                else:
                    orders.accepted_ids.append(request.request_id)
            case _Abort(request_id):
                orders.events += engine.abort(request_id)
            case _Stop(request_id, index):
                orders.events += engine.stop(request_id, index)
            case _Pause(is_paused):
                self._is_paused = is_paused
            case _Describe(request_id):
                orders.progress.append((request_id, engine.progress(request_id)))


class _Orders:
    """What obeying the inbox brought in one turn."""

    def __init__(self) -> None:
        self.events: list[SequenceEvent] = []
        self.accepted_ids: list[str] = []
        self.rejected: list[tuple[str, RopewayError]] = []
        self.progress: list[tuple[str, Sequence[SequenceProgress]]] = []

    @property
    def has_news(self) -> bool:
        return bool(self.accepted_ids or self.rejected or self.progress)

    @property
    def has_any(self) -> bool:
        return bool(self.events) or self.has_news
