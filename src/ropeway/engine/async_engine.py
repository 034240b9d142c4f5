"""The asyncio side of the engine thread. Knows the event loop and text; knows nothing of HTTP or model files.

`AsyncEngine` carries each turn's news to the event loop with a single wake-up, turns token events into text there, and
hands it to the `OutputStream`s that wait. Closing a stream frees its blocks before the next step is planned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ropeway.core.params import FinishReason, Request, Timeout
from ropeway.core.plan import SequenceEvent
from ropeway.core.stats import EngineStats, SequenceProgress
from ropeway.engine.engine import Engine
from ropeway.engine.engine_thread import EngineThread, StepNews
from ropeway.engine.metrics import EngineMetrics, RequestTimes
from ropeway.engine.output_stream import OutputStream
from ropeway.engine.request_report import RequestReport
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


@dataclass(slots=True)
class _OpenRequest:
    """num_in_engine: sequences whose terminal event has not come; a stop string ends the text earlier than that.
    error: what it ended with instead of an answer. abort_cause: why it was aborted, where nobody wished it.
    """

    assembler: Assembler
    stream: OutputStream
    times: RequestTimes
    num_in_engine: int
    error: RopewayError | None = None
    abort_cause: RopewayError | None = None
    is_started: bool = False
    num_cached_tokens: int = 0
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)

    def report(self, end_s: float | None = None) -> RequestReport:
        request = self.assembler.request
        return RequestReport(
            request_id=request.request_id,
            num_prompt_tokens=self.times.num_prompt_tokens,
            num_generated_tokens=self.assembler.num_generated_tokens,
            num_cached_tokens=self.num_cached_tokens,
            finish_reasons=tuple([self.finish_reasons.get(index) for index in range(request.params.n)]),
            error=self.error or self.abort_cause,
            has_started=self.is_started,
            arrival_s=self.times.arrival_s,
            first_scheduled_s=self.times.first_scheduled_s,
            first_token_s=self.times.first_token_s,
            end_s=end_s,
        )


class AsyncEngine:
    """An engine for asyncio: streams of text deltas, aborts, orderly shutdown, health.

    Belongs to the event loop that runs `start`. `abort` may be called from any thread; the rest from that loop.
    meter: the backend, where it counts its calls and work. on_ended: told of every request that has ended, on the loop.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, meter: CallMeter | None = None) -> None:
        self.metrics = EngineMetrics()
        self.on_ended: Callable[[RequestReport], None] | None = None
        self._tokenizer = tokenizer
        self._thread = EngineThread(engine, self._deliver_soon, meter)
        self._queue_limits = engine.queue_limits
        self._open: dict[str, _OpenRequest] = {}
        self._num_unstarted = 0  # of the open requests, but for background ones
        self._num_unstarted_tokens = 0  # of their prompts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._is_closing = False
        self._is_paused = False
        self._asked: dict[str, asyncio.Future[Sequence[SequenceProgress]]] = {}
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
    def held_s(self) -> float:
        """Seconds for which steps were held for requests to come, in all."""
        return self._thread.held_s

    @property
    def utilization(self) -> Utilization | None:
        """How the engine's time is used; None where the backend does not count."""
        return self._thread.utilization

    def check_queue(self) -> None:
        """Raises OverloadedError where the engine would refuse one more request, which spares encoding its prompt.

        It counts what is still on its way to the engine, and free places as of the last step; the engine decides.
        """
        try:
            self._queue_limits.check(self._num_unstarted, self._num_unstarted_tokens, self.stats.num_places)
        except OverloadedError:
            self.metrics.num_refused += 1
            raise

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hands requests to the engine; their deltas come out of the one stream returned.

        Raises EngineStoppedError after shutdown or failure, InvalidRequestError for a request id in use.
        """
        self._check_running()
        stream = OutputStream([request.request_id for request in requests], self._abort)
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

    def _abort(self, request_id: str, cause: RopewayError | None) -> None:
        """For a stream that is closed, on the loop."""
        if cause is not None and request_id in self._open:
            self._open[request_id].abort_cause = cause
        self.abort(request_id)

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause(self) -> None:
        """Plans nothing from the next step on: requests keep their memory and queue up, until `resume`."""
        self._is_paused = True
        self._thread.pause(True)

    def resume(self) -> None:
        """Goes on where `pause` has stopped."""
        self._is_paused = False
        self._thread.pause(False)

    async def progress(self, request_id: str) -> Sequence[SequenceProgress]:
        """Where the sequences of an open request are, within a step; empty for others."""
        if request_id not in self._open or not self._thread.is_alive:
            return ()
        asked = self._asked.get(request_id)
        if asked is None:
            asked = self._asked[request_id] = asyncio.get_running_loop().create_future()
            self._thread.describe(request_id)
        return await asyncio.shield(asked)  # others may wait for the same

    def report(self, request_id: str) -> RequestReport | None:
        """What is known of a request that is open."""
        entry = self._open.get(request_id)
        return None if entry is None else entry.report()

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

    def check_ready(self, stall_s: float) -> None:
        """Raises EngineStoppedError where a request sent now would not be served: as check_health, or paused."""
        self.check_health(stall_s)
        if self._is_closing:
            raise EngineStoppedError("the engine is shutting down")
        if self._is_paused:
            raise EngineStoppedError("the engine is paused; POST /resume lets it go on")

    async def shutdown(self, timeout_s: float) -> bool:
        """Refuses new requests, lets the open ones finish for timeout_s, aborts the rest, ends the thread.

        Returns whether everything finished by itself.
        """
        self._is_closing = True
        if self._is_paused:
            self.resume()  # what does not run does not finish
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
                self._open[request_id].stream.accept(request_id)
        for request_id in news.started_ids:
            if request_id in self._open:
                self._start(self._open[request_id], news.step_start_s)
        self._deliver_events(news)
        for request_id, progress in news.progress:
            self._answer(request_id, progress)
        for request_id, error in news.rejected:
            self.metrics.num_refused += 1
            self._refuse(request_id, error, news.now_s)
        if news.failure is not None:
            self._fail_all(news.failure, news.now_s)
        if not self._open:
            self._idle.set()

    def _deliver_events(self, news: StepNews) -> None:
        streams: dict[OutputStream, None] = {}
        open_requests, now_s = self._open, news.now_s
        for event in news.events:
            entry = open_requests.get(event.request_id)
            if entry is not None:
                streams[entry.stream] = None
                self._deliver_event(entry, event, now_s)
        for stream in streams:
            stream.flush()

    def _start(self, entry: _OpenRequest, now_s: float) -> None:
        self._count_unstarted(entry, -1)
        entry.is_started = True
        self.metrics.on_scheduled(entry.times, now_s)

    def _count_unstarted(self, entry: _OpenRequest, num_requests: int) -> None:
        """An entry joins (1) those that have not started, or leaves them (-1). The background is in nobody's way."""
        if entry.assembler.request.terms.is_background:
            return
        self._num_unstarted += num_requests
        self._num_unstarted_tokens += num_requests * entry.times.num_prompt_tokens * entry.assembler.request.params.n

    def _close(self, request_id: str, now_s: float) -> None:
        entry = self._open.pop(request_id)
        if not entry.is_started:
            self._count_unstarted(entry, -1)
        self._answer(request_id, ())  # nobody else will, where the engine is gone
        if self.on_ended is not None:
            self.on_ended(entry.report(now_s))

    def _answer(self, request_id: str, progress: Sequence[SequenceProgress]) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None and not asked.done():
            asked.set_result(progress)

    def _deliver_event(self, entry: _OpenRequest, event: SequenceEvent, now_s: float) -> None:
        if event.timeout is not None and entry.error is None:
            self._break(entry, _timeout_error(event.timeout, entry, now_s), now_s)
        if entry.error is None:
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
                self._close(event.request_id, now_s)

    def _deliver_delta(self, entry: _OpenRequest, delta: Delta, now_s: float) -> None:
        self.metrics.on_tokens(entry.times, delta.index, len(delta.token_ids), now_s)
        if delta.num_cached_tokens > entry.num_cached_tokens and delta.index == 0:
            entry.num_cached_tokens = delta.num_cached_tokens
        entry.stream.put(delta)
        if delta.finish_reason is None:
            return
        if delta.is_stopped_by_text:
            self._thread.stop(delta.request_id, delta.index)
        entry.finish_reasons[delta.index] = delta.finish_reason
        self.metrics.on_finished(entry.times, delta.finish_reason, now_s)
        if entry.assembler.is_finished:
            entry.stream.finish(delta.request_id)

    def _fail_all(self, failure: BaseException, now_s: float) -> None:
        self._failure = failure
        for request_id in list(self._open):
            self._fail(request_id, EngineStoppedError(f"the engine failed: {failure!r}"), now_s)

    def _fail(self, request_id: str, error: RopewayError, now_s: float) -> None:
        if request_id in self._open:
            entry = self._open[request_id]
            if entry.error is None:
                self._break(entry, error, now_s)
            self._close(request_id, now_s)

    def _refuse(self, request_id: str, error: RopewayError, now_s: float) -> None:
        """A request that the engine did not take: nothing of it has ended, since nothing began."""
        if request_id in self._open:
            entry = self._open[request_id]
            entry.error = error
            entry.stream.fail(request_id, error)
            self._close(request_id, now_s)

    def _break(self, entry: _OpenRequest, error: RopewayError, now_s: float) -> None:
        entry.error = error
        for _ in range(entry.assembler.num_unfinished):
            self.metrics.on_finished(entry.times, "error", now_s)
        if not entry.assembler.is_finished:
            entry.stream.fail(entry.assembler.request.request_id, error)


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
