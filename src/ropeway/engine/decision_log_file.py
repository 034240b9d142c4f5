"""The decision log on disk: a thread of its own encodes and writes, so that serving never waits for a disk.

A log that cannot go on, because the disk is full or fails, the size it may have is reached, or the disk is slower than
the engine for long, ends with one warning; the engine goes on. What is on disk then can be replayed up to there.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from ropeway.core.decision_log import HeaderValue, LogEncoder, Record
from ropeway.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_QUEUED_RECORDS = 100_000
# Records are gathered this long before they are written, so that the writer does not wake at every step.
GATHER_S = 0.1


class DecisionLogFile:
    """A log being written. `put` may be called from any one thread and never blocks.

    options: the header. max_bytes: the log ends before it gets larger.

    Raises ConfigError where the file cannot be written to.
    """

    def __init__(self, path: Path, options: Mapping[str, HeaderValue], max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._encoder = LogEncoder()
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._is_open = True
        header = self._encoder.header(options)
        try:
            self._file: FileIO = path.open("wb", buffering=0)  # a buffer would fail a second time when it is closed
            try:
                self._write(header)
            except OSError:
                self._file.close()
                raise
        except OSError as error:
            raise ConfigError(f"cannot write the decision log {path}: {error.strerror}; name another file") from error
        self._num_bytes = len(header)
        self._thread = threading.Thread(target=self._run, name="ropeway-decision-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        """Whether records are still written."""
        return self._is_open

    def put(self, record: Record) -> None:
        """Hands over a record; dropped once the log has ended."""
        if not self._is_open:
            return
        if self._queue.qsize() >= MAX_QUEUED_RECORDS:
            self._end(f"{MAX_QUEUED_RECORDS} records wait for a slow disk")
            return
        self._queue.put(record)

    def close(self) -> None:
        """Writes what was handed over and closes the file; the end of the program does so, too."""
        atexit.unregister(self.close)
        self._closing.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._file:
                while self._write_gathered():
                    pass
        except OSError as error:
            self._end(error.strerror or str(error))

    def _write_gathered(self) -> bool:
        """Waits for records, lets more gather, and writes them all; False at the end."""
        record = self._queue.get()
        self._closing.wait(GATHER_S)
        parts: list[bytes] = []
        while record is not None:
            part = self._encoder.encode(record)
            self._num_bytes += len(part)
            if self._num_bytes > self._max_bytes:
                self._end(f"it has reached its bound of {self._max_bytes} bytes")
                break
            parts.append(part)
            if self._queue.empty():
                break
            record = self._queue.get()
        self._write(b"".join(parts))
        return record is not None and self._is_open

    def _write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]

    def _end(self, reason: str) -> None:
        if self._is_open:
            self._is_open = False
            logger.warning("the decision log %s ends here: %s; serving goes on", self._path, reason)
