"""The engine thread, and its asyncio side. Knows threads and the event loop; knows nothing of HTTP or model files.

`EngineThread` owns an `Engine`: only its thread touches it. Messages reach it through an inbox, from any thread;
whatever a step brings leaves as one `StepNews`. `AsyncEngine` carries each news to the event loop with a single
wake-up, turns token events into text there, and hands it to the `OutputStream`s that wait. A reader that stops
reading holds up nobody: its stream only gathers, bounded by the tokens its requests may generate.

A message sent before a step ends is obeyed before the next step is planned: so closing a stream frees its blocks by
then.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ropeway.core.params import Request, Timeout
from ropeway.core.plan import SequenceEvent
from ropeway.core.stats import EngineStats
from ropeway.engine.engine import Engine
from ropeway.engine.metrics import EngineMetrics, RequestTimes
from ropeway.engine.target_log import TargetLog
from ropeway.engine.utilization import CallMeter, Utilization
from ropeway.errors import (
    EngineStoppedError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    RopewayError,
)
from ropeway.outputs import Assembler, Delta
from ropeway.text.tokenizer import Tokenizer

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


@dataclass(slots=True)
class _OpenRequest:
    """num_in_engine: sequences whose terminal event has not come; a stop string ends the text earlier than that."""

    assembler: Assembler
    stream: OutputStream
    times: RequestTimes
    num_in_engine: int
    is_broken: bool = False
    is_started: bool = False


# Takes deltas; returns what to await before it is given more, or None.
DeltaSink = Callable[[list[Delta]], Awaitable[None] | None]


class OutputStream:
    """The deltas of one or several requests, in the order they came. One reader, on the event loop.

    Closing it (or leaving its `async with`) aborts what has not finished.
    """

    def __init__(self, engine: AsyncEngine, request_ids: Sequence[str]) -> None:
        self._engine = engine
        self._unfinished = set(request_ids)
        self._unaccepted = set(request_ids)
        self._deltas: list[Delta] = []
        self._error: RopewayError | None = None
        self._is_closed = False
        # One reader waits at a time: a bare future costs half of what an asyncio.Event does, at every token.
        self._reader: asyncio.Future[None] | None = None
        self._reader_wants_end = False
        # While `pass_on` waits: what takes the news of a step at once, and what came of that.
        self._write: DeltaSink | None = None
        self._congestion: Awaitable[None] | None = None
        self._write_failure: Exception | None = None

    @property
    def is_finished(self) -> bool:
        """Every request has ended; deltas may still wait to be taken."""
        return not self._unfinished

    async def wait_accepted(self) -> None:
        """Waits until the engine has taken every request: within a step. Raises the error of one that it refused."""
        while self._unaccepted and not self._is_over:
            await self._wait(wants_end=False)
        if self._error is not None:
            raise self._error

    async def take(self) -> list[Delta]:
        """Waits for news and returns all of it; an empty list once everything has been taken or the stream was closed.

        Raises the error of a request that the engine refused, EngineStoppedError where the engine failed.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return []
            await self._wait(wants_end=False)
        deltas, self._deltas = self._deltas, []
        return deltas

    async def take_all(self) -> list[Delta]:
        """Waits for the end and returns every delta not yet taken. Raises as `take` does."""
        while not self._is_over:
            await self._wait(wants_end=True)
        if self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas

    async def pass_on(self, write: DeltaSink) -> None:
        """Hands all news to `write` until the end, or until the stream is closed.

        write: called on the event loop with what one step brought, straight from the step's one wake-up: a waiting
        task for each of many streams would cost more than the text. Where it can take no more for now, it returns what
        to await; the stream gathers meanwhile.

        Raises as `take` does, and whatever `write` raises.
        """
        while True:
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                congestion = write(deltas)
                if congestion is not None:
                    await congestion
                continue
            if self._error is not None:
                raise self._error
            if self._is_over:
                return
            self._write = write
            try:
                await self._wait(wants_end=True)
            finally:
                self._write = None
            if self._write_failure is not None:
                raise self._write_failure
            if self._congestion is not None:
                congestion, self._congestion = self._congestion, None
                await congestion

    def close(self) -> None:
        """Aborts what has not finished and ends the stream; its blocks are free before the next step is planned."""
        if not self._is_closed:
            self._is_closed = True
            for request_id in self._unfinished:
                self._engine.abort(request_id)
            self._wake()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._error is not None or not self._unfinished

    async def _wait(self, *, wants_end: bool) -> None:
        assert self._reader is None, "a stream has one reader"
        self._reader = asyncio.get_running_loop().create_future()
        self._reader_wants_end = wants_end
        try:
            await self._reader
        finally:
            self._reader = None

    def _put(self, delta: Delta) -> None:
        if not self._is_closed:
            self._deltas.append(delta)
            if not self._reader_wants_end:
                self._wake()

    def _accept(self, request_id: str) -> None:
        self._unaccepted.discard(request_id)
        if not self._unaccepted and not self._reader_wants_end:
            self._wake()

    def _flush(self) -> None:
        """Gives what a step brought to the writer that waits, if one does."""
        if self._write is None or not self._deltas:
            return
        deltas, self._deltas = self._deltas, []
        try:
            self._congestion = self._write(deltas)
        except Exception as failure:  # it is the reader's, not that of whoever delivers
            self._write_failure = failure
        if self._congestion is not None or self._write_failure is not None:
            self._write = None
            self._wake()

    def _finish(self, request_id: str) -> None:
        self._unfinished.discard(request_id)
        if not self._unfinished:
            self._wake()

    def _fail(self, request_id: str, error: RopewayError) -> None:
        self._error = self._error or error
        self._unfinished.discard(request_id)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class AsyncEngine:
    """An engine for asyncio: streams of text deltas, aborts, orderly shutdown, health.

    Belongs to the event loop that runs `start`. `abort` may be called from any thread; the rest from that loop.
    meter: the backend, where it counts its calls and work.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, meter: CallMeter | None = None) -> None:
        self.metrics = EngineMetrics()
        self._tokenizer = tokenizer
        self._thread = EngineThread(engine, self._deliver_soon, meter)
        self._queue_limits = engine.queue_limits
        self._open: dict[str, _OpenRequest] = {}
        self._num_unstarted = 0  # of the open requests
        self._num_unstarted_tokens = 0  # of their prompts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._is_closing = False
        self._busy_since_s = 0.0
        self._idle = asyncio.Event()

    def start(self) -> None:
        """Starts the engine thread for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()

    @property
    def num_open_requests(self) -> int:
        return len(self._open)

    def is_idle(self) -> bool:
        """Whether no request is open; may be called from any thread."""
        return not self._open

    @property
    def stats(self) -> EngineStats:
        """The engine's counters as of its last step."""
        return self._thread.stats

    @property
    def utilization(self) -> Utilization | None:
        """How the engine's time is used; None where the backend does not count."""
        return self._thread.utilization

    def check_queue(self) -> None:
        """Raises OverloadedError where the engine would refuse one more request, which spares encoding its prompt.

        It counts what is still on its way to the engine, and free places as of the last step; the engine decides.
        """
        self._queue_limits.check(self._num_unstarted, self._num_unstarted_tokens, self.stats.num_places)

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hands requests to the engine; their deltas come out of the one stream returned.

        Raises EngineStoppedError after shutdown or failure, InvalidRequestError for a request id in use.
        """
        self._check_running()
        stream = OutputStream(self, [request.request_id for request in requests])
        now_s = time.monotonic()
        for request in requests:
            if request.request_id in self._open:
                raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        if not self._open:
            self._busy_since_s = now_s
        for request in requests:
            times = RequestTimes(now_s, len(request.prompt_token_ids))
            assembler = Assembler(request, self._tokenizer)
            entry = self._open[request.request_id] = _OpenRequest(assembler, stream, times, request.params.n)
            self._count_unstarted(entry, 1)
            self._thread.submit(request)
        self._idle.clear()
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request with `abort`; nothing happens where it has ended already."""
        self._thread.abort(request_id)

    def check_health(self, stall_s: float) -> None:
        """Raises EngineStoppedError where the engine is down, or has had work for stall_s without completing a step."""
        if self._failure is not None:
            raise EngineStoppedError(f"the engine failed: {self._failure!r}; restart the server")
        if not self._thread.is_alive:
            raise EngineStoppedError("the engine is not running")
        if self._thread.has_failed_last:
            raise EngineStoppedError("the last step failed, and no step has succeeded since; see the server's log")
        if self._open:
            waited_s = time.monotonic() - max(self._busy_since_s, self._thread.last_step_s)
            if waited_s > stall_s:
                raise EngineStoppedError(
                    f"no step has completed for {waited_s:.1f} s with {len(self._open)} requests open (limit "
                    f"{stall_s:g} s)"
                )

    async def shutdown(self, timeout_s: float) -> bool:
        """Refuses new requests, lets the open ones finish for timeout_s, aborts the rest, ends the thread.

        Returns whether everything finished by itself.
        """
        self._is_closing = True
        is_drained = True
        if self._thread.is_alive:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                is_drained = False
                self.abort_all()
            self._thread.close()
            while self._thread.is_alive:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0)  # lets the last news in
        return is_drained and self._failure is None

    def kill(self, timeout_s: float) -> bool:
        """Ends the thread after the step it is in, whatever is open; from any thread. Whether it ended within
        timeout_s.
        """
        self._is_closing = True
        self._thread.close()
        return self._thread.join(timeout_s)

    def abort_all(self) -> None:
        """Aborts every open request."""
        for request_id in self._open:
            self._thread.abort(request_id)

    def _check_running(self) -> None:
        if self._loop is None:
            raise EngineStoppedError("the engine has not been started")
        if self._failure is not None:
            raise EngineStoppedError(f"the engine failed: {self._failure!r}; restart the server")
        if self._is_closing or not self._thread.is_alive:
            raise EngineStoppedError("the engine is shutting down; send the request to another server")

    def _deliver_soon(self, news: StepNews) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, news)
        except RuntimeError:
            # The loop has been closed under us: nobody is left to tell.
            logger.warning("the event loop closed before the engine; %d events were lost", len(news.events))

    def _deliver(self, news: StepNews) -> None:
        for request_id in news.accepted_ids:
            if request_id in self._open:
                self._open[request_id].stream._accept(request_id)
        for request_id in news.started_ids:
            if request_id in self._open:
                self._start(self._open[request_id], news.now_s)
        self._deliver_events(news)
        for request_id, error in news.rejected:
            self._fail(request_id, error, news.now_s)
        if news.failure is not None:
            self._fail_all(news.failure, news.now_s)
        if not self._open:
            self._idle.set()

    def _deliver_events(self, news: StepNews) -> None:
        streams: dict[OutputStream, None] = {}
        for event in news.events:
            entry = self._open.get(event.request_id)
            if entry is not None:
                streams[entry.stream] = None
                self._deliver_event(entry, event, news.now_s)
        for stream in streams:
            stream._flush()

    def _start(self, entry: _OpenRequest, now_s: float) -> None:
        self._count_unstarted(entry, -1)
        entry.is_started = True
        self.metrics.on_scheduled(entry.times, now_s)

    def _count_unstarted(self, entry: _OpenRequest, num_requests: int) -> None:
        """An entry joins (1) those that have not started, or leaves them (-1)."""
        self._num_unstarted += num_requests
        self._num_unstarted_tokens += num_requests * entry.times.num_prompt_tokens * entry.assembler.request.params.n

    def _close(self, request_id: str) -> _OpenRequest:
        entry = self._open.pop(request_id)
        if not entry.is_started:
            self._count_unstarted(entry, -1)
        return entry

    def _deliver_event(self, entry: _OpenRequest, event: SequenceEvent, now_s: float) -> None:
        if event.timeout is not None and not entry.is_broken:
            self._break(entry, _timeout_error(event.timeout, entry, now_s), now_s)
        if not entry.is_broken:
            try:
                delta = entry.assembler.push(event)
            except Exception as error:
                logger.exception("request %s: its text could not be put together", event.request_id)
                self._thread.abort(event.request_id)
                self._break(entry, EngineStoppedError(f"internal error: {error!r}"), now_s)
            else:
                if delta is not None:
                    self._deliver_delta(entry, delta, now_s)
        if event.finish_reason is not None:
            entry.num_in_engine -= 1
            if entry.num_in_engine == 0:
                self._close(event.request_id)

    def _deliver_delta(self, entry: _OpenRequest, delta: Delta, now_s: float) -> None:
        self.metrics.on_tokens(entry.times, delta.index, len(delta.token_ids), now_s)
        entry.stream._put(delta)
        if delta.is_stopped_by_text:
            self._thread.stop(delta.request_id, delta.index)
        if delta.finish_reason is not None:
            self.metrics.on_finished(entry.times, delta.finish_reason, now_s)
            if entry.assembler.is_finished:
                entry.stream._finish(delta.request_id)

    def _fail_all(self, failure: BaseException, now_s: float) -> None:
        self._failure = failure
        for request_id in list(self._open):
            self._fail(request_id, EngineStoppedError(f"the engine failed: {failure!r}"), now_s)

    def _fail(self, request_id: str, error: RopewayError, now_s: float) -> None:
        if request_id in self._open:
            entry = self._close(request_id)
            if not entry.is_broken:
                self._break(entry, error, now_s)

    def _break(self, entry: _OpenRequest, error: RopewayError, now_s: float) -> None:
        entry.is_broken = True
        for _ in range(entry.assembler.num_unfinished):
            self.metrics.on_finished(entry.times, "error", now_s)
        if not entry.assembler.is_finished:
            entry.stream._fail(entry.assembler.request.request_id, error)


def _timeout_error(timeout: Timeout, entry: _OpenRequest, now_s: float) -> RopewayError:
    """What a request that ran into one of its limits is told."""
    waited_s, terms = now_s - entry.times.arrival_s, entry.assembler.request.terms
    if timeout == "queue":
        return OverloadedError(
            f"it waited {waited_s:.1f} s in the queue without starting (its queue_timeout is "
            f"{terms.queue_timeout_s:g} s); try again later"
        )
    return RequestTimeoutError(
        f"it was not finished after {waited_s:.1f} s (its timeout is {terms.timeout_s:g} s), with "
        f"{entry.assembler.num_generated_tokens} tokens generated: ask for fewer, or allow more time"
    )
