"""The one thread that works on a journal: what comes while the disk is busy is committed together.

Knows nothing of what the operations do, and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ropeway.batch.journal import Journal
from ropeway.errors import BatchStoreError, RopewayError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Callable[[Journal], T]


class JournalThread:
    """Runs operations in the order they come, in groups of one commit each. The thread is a daemon: a process that is
    ended loses what nobody has been told of.
    """

    MAX_GROUP = 256

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._inbox: queue.SimpleQueue[tuple[Operation[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ropeway-journal", daemon=True)
        self._is_closed = False
        self.num_commits = 0
        self.num_operations = 0
        self._thread.start()

    async def run(self, operation: Operation[T]) -> T:
        """The operation's result, once it is on disk. Raises BatchStoreError where it is not.

        An operation refuses with a RopewayError before it has changed anything; the others of its group go on. Where
        a group fails, each of its operations is done again alone.
        """
        return await asyncio.wrap_future(self.submit(operation))

    def submit(self, operation: Operation[T]) -> Future[T]:
        """As `run`, for callers without an event loop."""
        if self._is_closed:
            raise BatchStoreError("the journal is closed: the server is shutting down")
        future: Future[T] = Future()
        self._inbox.put((operation, future))
        return future

    def close(self) -> None:
        """Finishes what was submitted, and closes the journal. Blocks for as long as that takes."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(None)
            self._thread.join()
            self._journal.close()

    def _run(self) -> None:
        is_open = True
        while is_open:
            group = [self._inbox.get()]
            while len(group) < self.MAX_GROUP and not self._inbox.empty():
                group.append(self._inbox.get())
            is_open = None not in group
            self._commit([each for each in group if each is not None])

    def _commit(self, group: list[tuple[Operation[Any], Future[Any]]]) -> None:
        settled: list[tuple[Future[Any], Any, RopewayError | None]] = []
        self.num_commits += 1
        try:
            with self._journal.transaction():
                for operation, future in group:
                    try:
                        settled.append((future, operation(self._journal), None))
                    except RopewayError as refusal:
                        settled.append((future, None, refusal))
        except Exception as error:
            if len(group) > 1:  # nothing of it has happened; each for itself, so that one harms no other
                for each in group:
                    self._commit([each])
                return
            settled = [(group[0][1], None, _reason(error))]
        self.num_operations += len(group)
        for future, result, failure in settled:
            if not future.set_running_or_notify_cancel():
                continue
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
        try:
            self._journal.give_back_space()
        except sqlite3.Error as error:  # what was committed stays so
            logger.warning("the journal of batches keeps the room of what was deleted: %s", error)


def _reason(error: Exception) -> BatchStoreError:
    if isinstance(error, sqlite3.Error | OSError):
        return BatchStoreError(f"the journal of batches cannot be written: {error}; is its disk full?")
    logger.error("an operation on the journal failed", exc_info=error)
    return BatchStoreError(f"internal error: {error!r}; see the server's log")
