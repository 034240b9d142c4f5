"""Answers under way and of late: whose they are, what they used, what became of them. Knows no HTTP and no text.

Every request to the engine goes through here, so its tokens are charged to its caller: those of the prompt when it is
handed over, those of the answer when it has ended. What never started is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ropeway.core.params import Request
from ropeway.engine.async_engine import AsyncEngine
from ropeway.engine.output_stream import OutputStream
from ropeway.engine.request_report import RequestReport
from ropeway.server.tenants import Caller


@dataclass(slots=True, eq=False)
class AnswerRecord:
    """One answer, of one engine request per prompt. reports: of those that have ended, by request id."""

    answer_id: str
    caller: Caller
    tenant: str
    request_ids: tuple[str, ...]
    reports: dict[str, RequestReport] = field(default_factory=dict)


class RequestBook:
    """Hands requests to the engine, and keeps account of them. Belongs to the event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._record_of: dict[str, AnswerRecord] = {}  # by the ids of the engine's open requests
        engine.on_ended = self._on_ended

    def submit(self, answer_id: str, requests: Sequence[Request], caller: Caller) -> OutputStream:
        """Hands the requests of one answer to the engine. Raises as `AsyncEngine.submit` does."""
        stream = self._engine.submit(requests)
        ids = tuple([request.request_id for request in requests])
        record = AnswerRecord(answer_id, caller, caller.tenant, ids)
        for request in requests:
            self._record_of[request.request_id] = record
            caller.charge(len(request.prompt_token_ids))
        return stream

    def _on_ended(self, report: RequestReport) -> None:
        record = self._record_of.pop(report.request_id)
        record.reports[report.request_id] = report
        record.caller.charge(report.num_generated_tokens if report.has_started else -report.num_prompt_tokens)
