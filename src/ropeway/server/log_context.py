"""Which request a log record belongs to. Imports no web framework, so that logging can begin before one is loaded."""

from __future__ import annotations

import logging
from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("request_id", default="")


class RequestIdFilter(logging.Filter):
    """Gives log records a `request`: the name of the request that is being served, in brackets, or nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        current = current_request_id.get()
        record.request = f" [{current}]" if current else ""
        return True
