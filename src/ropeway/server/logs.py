"""What the server's log looks like: text or JSON, each record with the request that it belongs to.

Imports no web framework, so that logging can begin before one is loaded. Nobody logs headers, bodies or query strings:
that is where keys are.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

# A log record's attribute: a dict whose entries stand beside the message, in JSON only.
FIELDS = "ropeway_fields"

current_request_id: ContextVar[str] = ContextVar("request_id", default="")

logger = logging.getLogger(__name__)


class RequestIdFilter(logging.Filter):
    """Gives log records a `request`: the name of the request that is being served, in brackets, or nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        current = current_request_id.get()
        record.request = f" [{current}]" if current else ""
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per record, on one line: time, level, logger, message, and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        whole = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            whole["request_id"] = request_id
        whole |= getattr(record, FIELDS, {})
        if record.exc_info and record.exc_info[0] is not None:
            whole["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            whole["stack"] = record.stack_info
        return json.dumps(whole, default=str)


def json_line(logger_name: str, message: str, fields: dict[str, object]) -> str:
    """What a record would be, for a stream that no handler writes to."""
    record = logging.LogRecord(logger_name, logging.INFO, "", 0, message, None, None)
    setattr(record, FIELDS, fields)
    return JsonFormatter().format(record)


def begin_logging(log_format: LogFormat, stream: TextIO) -> None:
    """Sends every record to `stream` from now on, of libraries too; of uvicorn from warnings on.

    In JSON so do Python's warnings and what ends a thread or the process, so that the stream holds nothing but objects.
    """
    handler = logging.StreamHandler(stream)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_thread
    else:
        handler.addFilter(RequestIdFilter())
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("the process ends", exc_info=(kind, error, trace))


def _log_thread(args: threading.ExceptHookArgs) -> None:
    name = "a thread" if args.thread is None else f"thread {args.thread.name}"
    if args.exc_value is not None:
        logger.critical("%s ends", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))
