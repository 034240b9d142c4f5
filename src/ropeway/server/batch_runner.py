"""Runs the lines of open batches: takes them from the journal, keeps a bounded number in flight, records the answers.

Knows no HTTP. A line in flight is nothing but a pending line that somebody works on: whatever happens to this process,
it is pending again, and what it is answered then is the same.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ropeway.batch.directory import BatchDirectory
from ropeway.batch.journal import Journal
from ropeway.batch.journal_thread import JournalThread
from ropeway.batch.lines import LineLimits, read_lines
from ropeway.batch.output import WrittenFiles, write_results
from ropeway.batch.records import BatchRecord, FileRecord, LineAnswer, PendingLine
from ropeway.errors import BatchStoreError
from ropeway.server.batch_answers import TryAgainError, error_answer

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # at a line whose steps fail
LINES_AT_ONCE = 256  # read from the journal
TICK_S = 1.0  # how often time limits are looked at, and what had to wait is tried again

EndStatus = Literal["completed", "expired", "cancelled"]
# (batch, line as it is in the input, seed) -> its answer. Raises TryAgainError.
Answerer = Callable[[BatchRecord, bytes, int], Awaitable[LineAnswer]]


@dataclass(slots=True, eq=False)
class _OpenBatch:
    """A batch under way. waiting: lines read from the journal; last_read: the number of the last of them. ends_as: why
    no more of its lines are taken, where that is so. is_settling: its end is being written.
    """

    record: BatchRecord
    path: Path
    waiting: deque[PendingLine] = field(default_factory=deque)
    last_read: int = 0
    is_read: bool = False
    in_flight: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    ends_as: EndStatus | None = None
    is_settling: bool = False

    @property
    def has_more(self) -> bool:
        return self.ends_as is None and bool(self.waiting or not self.is_read)

    @property
    def is_over(self) -> bool:
        return not (self.has_more or self.in_flight or self.is_settling)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTerms:
    """max_in_flight: lines at once. models: batches of others wait. limits: of input files. has_one_file: the output
    has the lines with an error too, each in its place. clock: epoch seconds.
    """

    max_in_flight: int
    models: Collection[str]
    limits: LineLimits
    has_one_file: bool = False
    clock: Callable[[], float] = time.time


class BatchRunner:
    """Works on every open batch of a journal until it is closed. Belongs to the event loop.

    on_answered: told of each answer that is on disk.
    """

    def __init__(
        self,
        directory: BatchDirectory,
        journal: JournalThread,
        answer: Answerer,
        terms: RunnerTerms,
        on_answered: Callable[[LineAnswer], None] | None = None,
    ) -> None:
        self._directory = directory
        self._journal = journal
        self._answer = answer
        self._terms = terms
        self._on_answered = on_answered
        self._open: dict[str, _OpenBatch] = {}  # by id, oldest first
        self._foreign: dict[str, BatchRecord] = {}  # of models that are not served here
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_in_flight = 0
        self._not_before_s = 0.0  # no line is taken until then, on the event loop's clock
        self._is_taking = True
        self._changed = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()  # for `wait_idle`
        self._failure: BatchStoreError | None = None  # why the journal could not be written, as of late

    # -- what others call ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Goes on with every batch that the journal holds open. Raises BatchStoreError."""
        for record in await self._journal.run(lambda journal: journal.open_batches()):
            self.add(record)
        self._main = asyncio.create_task(self._run())

    def add(self, record: BatchRecord) -> None:
        """Works on one more batch."""
        if record.model not in self._terms.models and record.status != "cancelling":
            logger.warning("batch %s waits for a server of the model %s", record.batch_id, record.model)
            self._foreign[record.batch_id] = record
            return
        batch = _OpenBatch(record, self._directory.file_path(record.input_file_id))
        self._open[record.batch_id] = batch
        if record.status == "cancelling":
            batch.ends_as = "cancelled"
        elif record.status == "validating":
            batch.is_settling = True
            self._begin_task(self._validate(batch))
        self._changed.set()

    def cancel(self, record: BatchRecord) -> None:
        """A batch is cancelling: what runs of it is aborted before the next step, and nothing more is taken."""
        if self._foreign.pop(record.batch_id, None) is not None:
            self.add(record)
        batch = self._open.get(record.batch_id)
        if batch is not None:
            batch.record = record
            self._end_early(batch, "cancelled")

    def stop_taking(self) -> None:
        """Takes no more lines; those in flight go on."""
        self._is_taking = False

    async def close(self) -> None:
        """Stops: lines in flight are pending again."""
        self._is_taking = False
        tasks = [*self._tasks, *[task for batch in self._open.values() for task in batch.in_flight.values()]]
        if self._main is not None:
            tasks.append(self._main)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_idle(self) -> None:
        """Waits until no batch is open. Raises BatchStoreError where the journal cannot be written."""
        while self._open:
            self._has_news.clear()
            if self._failure is not None:
                raise self._failure
            await self._has_news.wait()

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._take_lines()
            except (BatchStoreError, OSError) as error:
                self._hold_off(error)
            self._look_after_ends()
            await self._wait_for_change()
            self._changed.clear()

    async def _wait_for_change(self) -> None:
        # Not asyncio.wait_for, which in Python 3.11 may swallow being cancelled.
        timer = asyncio.get_running_loop().call_later(TICK_S, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def _take_lines(self) -> None:
        while self._is_taking and self._num_in_flight < self._terms.max_in_flight:
            batch = self._next_batch()
            if batch is None or asyncio.get_running_loop().time() < self._not_before_s:
                return
            if not batch.waiting:
                await self._read_more(batch)
                continue
            line = batch.waiting.popleft()
            self._num_in_flight += 1
            task = batch.in_flight[line.number] = asyncio.create_task(self._work_on(batch, line))
            # Not in the task, which may be cancelled before it begins.
            task.add_done_callback(partial(self._on_worked, batch, line.number))

    def _next_batch(self) -> _OpenBatch | None:
        """The oldest batch, with lines left, of the tenant that has the fewest in flight."""
        busy: Counter[str] = Counter()
        for batch in self._open.values():
            busy[batch.record.tenant] += len(batch.in_flight)
        ready = [batch for batch in self._open.values() if batch.has_more and not batch.is_settling]
        return min(ready, key=lambda batch: busy[batch.record.tenant], default=None)

    async def _read_more(self, batch: _OpenBatch) -> None:
        number, after = batch.record.number, batch.last_read
        lines = await self._journal.run(lambda journal: journal.pending_lines(number, after, LINES_AT_ONCE))
        batch.waiting.extend(lines)
        batch.is_read = len(lines) < LINES_AT_ONCE
        batch.last_read = lines[-1].number if lines else after

    def _look_after_ends(self) -> None:
        now_s = self._terms.clock()
        for batch_id, record in list(self._foreign.items()):
            if record.expires_s <= now_s:
                del self._foreign[batch_id]
                self._open[batch_id] = _OpenBatch(record, self._directory.file_path(record.input_file_id))
        for batch in list(self._open.values()):
            if batch.record.expires_s <= now_s and batch.has_more:
                self._end_early(batch, "expired")
            if batch.is_over and asyncio.get_running_loop().time() >= self._not_before_s:
                batch.is_settling = True
                self._begin_task(self._finish(batch))

    def _end_early(self, batch: _OpenBatch, status: EndStatus) -> None:
        batch.ends_as = status
        batch.waiting.clear()
        for task in batch.in_flight.values():
            task.cancel()
        self._changed.set()

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- one line ------------------------------------------------------------------------------------------------------

    async def _work_on(self, batch: _OpenBatch, line: PendingLine) -> None:
        answer = await self._answered(batch, line)
        if answer is None:
            batch.waiting.appendleft(line)
        else:
            await self._record(batch, line, answer)

    def _on_worked(self, batch: _OpenBatch, line_number: int, task: asyncio.Task[None]) -> None:
        self._num_in_flight -= 1
        del batch.in_flight[line_number]
        self._changed.set()

    async def _answered(self, batch: _OpenBatch, line: PendingLine) -> LineAnswer | None:
        """Its answer; None where it is to be tried again."""
        try:
            data = await asyncio.to_thread(_read_line, batch.path, line)
            return await self._answer(batch.record, data, line.seed)
        except (TryAgainError, OSError) as error:
            is_missing = isinstance(error, FileNotFoundError)  # somebody has removed it
            batch.attempts[line.number] += is_missing or (isinstance(error, TryAgainError) and error.has_run)
            if batch.attempts[line.number] >= MAX_ATTEMPTS:
                return error_answer(error)
            self._hold_off(error)
            return None
        except Exception as error:
            logger.exception("line %d of batch %s could not be answered", line.number, batch.record.batch_id)
            return error_answer(error)

    async def _record(self, batch: _OpenBatch, line: PendingLine, answer: LineAnswer) -> None:
        number = batch.record.number
        while True:
            try:
                await self._journal.run(lambda journal: journal.put_answer(number, line.number, answer))
            except BatchStoreError as error:
                self._hold_off(error)
                self._failure = error
                self._has_news.set()
                await asyncio.sleep(TICK_S)  # nothing is lost but time: it may be tried again
            else:
                self._failure = None
                break
        if self._on_answered is not None:
            self._on_answered(answer)

    def _hold_off(self, error: Exception) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._not_before_s:
            logger.warning("batches wait for a moment: %s", error)
        self._not_before_s = now_s + TICK_S

    # -- beginning and end of a batch ----------------------------------------------------------------------------------

    async def _validate(self, batch: _OpenBatch) -> None:
        record, limits = batch.record, self._terms.limits
        while batch.is_settling:
            try:
                specs, faults = await asyncio.to_thread(read_lines, batch.path, record.endpoint, limits)
                now_s = int(self._terms.clock())
                if faults:
                    await self._journal.run(partial(Journal.fail, batch_id=record.batch_id, faults=faults, now_s=now_s))
                    self._close_batch(record)
                else:
                    begin = partial(Journal.begin, batch_id=record.batch_id, specs=specs, now_s=now_s)
                    batch.record = await self._journal.run(begin)
                batch.is_settling = False
            except (BatchStoreError, OSError) as error:
                self._hold_off(error)
                await asyncio.sleep(TICK_S)
        self._changed.set()

    async def _finish(self, batch: _OpenBatch) -> None:
        """Writes the files of a batch and ends it. Cut off anywhere, it is done again from its beginning."""
        record, now_s = batch.record, int(self._terms.clock())
        status = batch.ends_as or "completed"
        try:
            if status == "completed" and record.status != "finalizing":
                await self._journal.run(
                    lambda journal: journal.set_status(record.batch_id, "finalizing", now_s, only_from="in_progress")
                )
            files = await asyncio.to_thread(self._write_files, record, status)
            await self._journal.run(lambda journal: journal.end(record.batch_id, status, files, now_s))
        except (BatchStoreError, OSError, sqlite3.Error) as error:
            self._hold_off(error)
            self._failure = BatchStoreError(f"the output of {record.batch_id} cannot be written: {error}")
            self._has_news.set()
            batch.is_settling = False
            return
        logger.info("batch %s is %s", record.batch_id, status)
        self._close_batch(record)

    def _close_batch(self, record: BatchRecord) -> None:
        del self._open[record.batch_id]
        self._has_news.set()
        self._changed.set()

    def _write_files(self, record: BatchRecord, status: str) -> list[FileRecord | None]:
        output_id, error_id = (f"file-{secrets.token_hex(16)}" for _ in range(2))
        written: WrittenFiles = write_results(
            self._directory.journal_path,
            record.number,
            status,
            self._directory.file_path(output_id),
            self._directory.file_path(output_id if self._terms.has_one_file else error_id),
        )
        now_s = int(self._terms.clock())

        def file(file_id: str, kind: str, num_bytes: int | None) -> FileRecord | None:
            if num_bytes is None:
                return None
            return FileRecord(
                file_id=file_id,
                tenant=record.tenant,
                filename=f"{record.batch_id}_{kind}.jsonl",
                purpose="batch_output",
                num_bytes=num_bytes,
                created_s=now_s,
                expires_s=now_s + record.output_lifetime_s,
            )

        if self._terms.has_one_file:
            return [file(output_id, "output", written.output_bytes), None]
        return [file(output_id, "output", written.output_bytes), file(error_id, "error", written.error_bytes)]


def _read_line(path: Path, line: PendingLine) -> bytes:
    with path.open("rb") as file:
        file.seek(line.start)
        return file.read(line.num_bytes)
