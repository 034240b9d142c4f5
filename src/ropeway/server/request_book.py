"""Answers under way and of late: whose they are, what they used, what became of them. Knows no HTTP and no text.

Every request to the engine goes through here, so its tokens are charged to its caller: those of the prompt when it is
handed over, those of the answer when it has ended. What never started is given back.

An answer goes by its own id, and by the request id of the client that asked for it; the newest of one name counts. It
is remembered for RETENTION_S after its end, and for less where more than MAX_ENDED have ended since.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ropeway.core.params import Request
from ropeway.core.stats import SequenceProgress
from ropeway.engine.async_engine import AsyncEngine
from ropeway.engine.output_stream import OutputStream
from ropeway.engine.request_report import RequestReport
from ropeway.errors import EngineStoppedError
from ropeway.server.errors import UnknownRequestError
from ropeway.server.logs import FIELDS
from ropeway.server.tenants import Caller

logger = logging.getLogger(__name__)

RETENTION_S = 600.0
MAX_ENDED = 4096

AnswerState = Literal["waiting", "running", "preempted", "finished", "aborted", "failed"]


@dataclass(slots=True, eq=False)
class AnswerRecord:
    """One answer, of one engine request per prompt. reports: of those that have ended, by request id.

    client_id: what the client calls it. created_s: seconds since the epoch. end_s: on the book's clock.
    """

    answer_id: str
    client_id: str
    caller: Caller
    tenant: str
    request_ids: tuple[str, ...]
    created_s: float
    reports: dict[str, RequestReport] = field(default_factory=dict)
    end_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStatus:
    """An answer as its owner may see it. waiting_reason: of the first sequence that waits."""

    answer_id: str
    created_s: float
    state: AnswerState
    waiting_reason: str | None
    finish_reasons: tuple[str | None, ...]
    error: str | None
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int


class AnswerListener(Protocol):
    """Who is told of answers as they come and go."""

    def on_submitted(self, answer_id: str, requests: Sequence[Request]) -> None:
        """The engine has them; called where the request is served."""
        ...

    def on_ended(self, answer_id: str, reports: Sequence[RequestReport]) -> None:
        """All have ended."""
        ...


class RequestBook:
    """Hands requests to the engine, and keeps account of them. Belongs to the event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        clock: Callable[[], float] = time.monotonic,
        listener: AnswerListener | None = None,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._clock = clock
        self._record_of: dict[str, AnswerRecord] = {}  # by the ids of the engine's open requests
        self._by_id: dict[str, AnswerRecord] = {}  # open or remembered, by answer id
        self._by_client_id: dict[tuple[str, str], AnswerRecord] = {}  # by tenant and the client's id
        self._ended: OrderedDict[str, AnswerRecord] = OrderedDict()  # by answer id, oldest end first
        engine.on_ended = self._on_ended

    def submit(self, answer_id: str, requests: Sequence[Request], caller: Caller, client_id: str) -> OutputStream:
        """Hands the requests of one answer to the engine. Raises as `AsyncEngine.submit` does."""
        stream = self._engine.submit(requests)
        ids = tuple([request.request_id for request in requests])
        record = AnswerRecord(answer_id, client_id, caller, caller.tenant, ids, time.time())
        self._by_id[answer_id] = self._by_client_id[caller.tenant, client_id] = record
        for request in requests:
            self._record_of[request.request_id] = record
            caller.charge(len(request.prompt_token_ids))
        self._forget_old()
        if self._listener is not None:
            self._listener.on_submitted(answer_id, requests)
        return stream

    async def status(self, name: str, caller: Caller) -> AnswerStatus:
        """An answer by its id or the client's own. Raises UnknownRequestError, also where it is another tenant's."""
        record = self._find(name, caller)
        progress: list[SequenceProgress] = []
        for request_id in record.request_ids:
            if request_id not in record.reports:
                progress += await self._engine.progress(request_id)
        reports = [report for each in record.request_ids if (report := self._report(record, each)) is not None]
        waiting = [each for each in progress if each.waiting_reason is not None]
        reason = waiting[0].waiting_reason if waiting else None
        return AnswerStatus(
            answer_id=record.answer_id,
            created_s=record.created_s,
            state=_state(record, progress),
            waiting_reason="paused" if waiting and self._engine.is_paused else reason,
            finish_reasons=tuple([reason for report in reports for reason in report.finish_reasons]),
            error=next((str(report.error) for report in reports if report.error is not None), None),
            num_prompt_tokens=sum(report.num_prompt_tokens for report in reports),
            num_generated_tokens=sum(report.num_generated_tokens for report in reports),
            num_cached_tokens=sum(report.num_cached_tokens for report in reports),
        )

    def abort(self, names: Sequence[str], caller: Caller) -> list[str]:
        """Aborts open answers by their ids or the clients' own; the ids of those that were open."""
        aborted = []
        for name in names:
            try:
                record = self._find(name, caller)
            except UnknownRequestError:
                continue
            if record.end_s is None:
                aborted.append(record.answer_id)
                self._abort(record)
        return aborted

    def abort_all(self) -> list[str]:
        """Aborts every open answer; their ids."""
        records = list(dict.fromkeys(self._record_of.values()))
        for record in records:
            self._abort(record)
        return [record.answer_id for record in records]

    def _abort(self, record: AnswerRecord) -> None:
        for request_id in record.request_ids:
            self._engine.abort(request_id)

    def _find(self, name: str, caller: Caller) -> AnswerRecord:
        self._forget_old()
        record = self._by_id.get(name) or self._by_client_id.get((caller.tenant, name))
        if record is None and caller.is_admin:
            record = next((each for each in self._by_id.values() if each.client_id == name), None)
        if record is None or not caller.may_see(record.tenant):
            raise UnknownRequestError(
                f"no request {name[:100]!r} is known; requests are remembered for {RETENTION_S:g} s after their end, "
                f"the last {MAX_ENDED} at most"
            )
        return record

    def _report(self, record: AnswerRecord, request_id: str) -> RequestReport | None:
        return record.reports.get(request_id) or self._engine.report(request_id)

    def _on_ended(self, report: RequestReport) -> None:
        record = self._record_of.pop(report.request_id, None)
        if record is None:
            return  # submitted past the book, by a program that shares the engine
        record.reports[report.request_id] = report
        record.caller.charge(report.num_generated_tokens if report.has_started else -report.num_prompt_tokens)
        if len(record.reports) == len(record.request_ids):
            record.end_s = self._clock()
            self._ended[record.answer_id] = record
            self._forget_old()
            _log_failure(record)
            if self._listener is not None:
                self._listener.on_ended(record.answer_id, list(record.reports.values()))

    def _forget_old(self) -> None:
        oldest_s = self._clock() - RETENTION_S
        while self._ended:
            answer_id, record = next(iter(self._ended.items()))
            assert record.end_s is not None
            if len(self._ended) <= MAX_ENDED and record.end_s >= oldest_s:
                return
            del self._ended[answer_id], self._by_id[answer_id]
            alias = (record.tenant, record.client_id)
            if self._by_client_id.get(alias) is record:
                del self._by_client_id[alias]


def _log_failure(record: AnswerRecord) -> None:
    """Which answer it was that the engine failed: its own log knows no clients. Refusals are told to them only."""
    reports = record.reports.values()
    error = next((each.error for each in reports if isinstance(each.error, EngineStoppedError)), None)
    if error is not None or any("error" in each.finish_reasons for each in reports):
        logger.error(
            "%s failed: %s",
            record.answer_id,
            error or "a step could not be computed",
            extra={FIELDS: {"request_id": record.client_id, "answer_id": record.answer_id}},
        )


def _state(record: AnswerRecord, progress: Sequence[SequenceProgress]) -> AnswerState:
    if record.end_s is not None or not progress:
        reports = record.reports.values()
        if any("abort" in report.finish_reasons for report in reports):
            return "aborted"  # its error, if there is one, tells why
        if any(report.has_failed for report in reports):
            return "failed"
        return "finished" if record.end_s is not None else "waiting"  # on its way to the engine
    states = {each.state for each in progress}
    for state in ("running", "preempted"):
        if state in states:
            return state
    return "waiting"
